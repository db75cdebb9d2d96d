"""PTX translated to C++ does what the PTX ISA says."""

from __future__ import annotations

import ctypes
import math
import random
import struct
from collections.abc import Sequence

import pytest
import torch

import ptx_bit_snippets
import ptx_convert_snippets
import ptx_float_snippets
import ptx_kernels
import ptx_matrix_kernels as matrices
import ptx_runs
import ptx_snippets as snippets

SNIPPETS = {
    **snippets.INTEGERS,
    **ptx_bit_snippets.SHIFTED,
    **ptx_bit_snippets.BITS,
    **ptx_float_snippets.ARITHMETIC,
    **ptx_float_snippets.COMPARISONS,
    **ptx_convert_snippets.CONVERSIONS,
}
NAN = 0x7FFFFFFF


class Args(ctypes.Structure):
    _fields_ = (
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("more", ctypes.c_uint32 * 2),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ptx_runs.Library:
    folder = tmp_path_factory.mktemp("ptx")
    texts = {"kernels": ptx_kernels.module(), "snippets": snippets.HEAD}
    texts["snippets"] += "".join(s.kernel(name) for name, s in SNIPPETS.items())
    for name, text in texts.items():
        (folder / f"{name}.ptx").write_text(text)
    sources = [ptx_runs.translate(folder / f"{name}.ptx") for name in texts]
    objects = ptx_runs.compile_objects([*sources, *ptx_runs.emulator_sources()], folder)
    return ptx_runs.link(objects, folder / "library.so")


def run(library, name, words: Sequence[int] = (), *, outputs=32, start=0, more=(0, 0), **launch):
    """The 32-bit words that a kernel leaves, of `outputs` that were `start`."""
    given = (ctypes.c_uint32 * max(16, len(words)))(*words)
    # Vectors need 32 aligned bytes, which ctypes does not promise.
    room = torch.full((outputs + 16,), start, dtype=torch.int64).to(torch.uint32)
    aligned = torch.zeros(len(given) + 16, dtype=torch.uint32)
    at = -aligned.data_ptr() // 4 % 8
    ctypes.memmove(aligned.data_ptr() + 4 * at, given, ctypes.sizeof(given))
    begin = -room.data_ptr() // 4 % 8
    pointers = (aligned.data_ptr() + 4 * at, room.data_ptr() + 4 * begin)
    library(name, Args(*pointers, (ctypes.c_uint32 * 2)(*more)), **launch)
    return room.tolist()[begin : begin + outputs]


@pytest.mark.parametrize("name", SNIPPETS)
def test_an_instruction_gives_the_bits_of_the_isa(library: ptx_runs.Library, name: str) -> None:
    snippet = SNIPPETS[name]
    rows = [row + (0,) * (3 - len(row)) for row in snippet.rows]
    words = (ctypes.c_uint64 * (3 * len(rows)))(*(value for row in rows for value in row))
    results = (ctypes.c_uint64 * len(rows))()
    args = struct.pack("QQ", ctypes.addressof(words), ctypes.addressof(results))
    library(name, args, threads=len(rows))
    wrong = [
        (list(map(hex, row)), f"expected {expected:#x}, got {got:#x}")
        for row, expected, got in zip(rows, snippet.expected, results)
        if expected != got
    ]
    assert not wrong, f"{snippet.code}: {wrong[:5]}"


def test_fp16_and_bf16_become_floats(library: ptx_runs.Library) -> None:
    for name, dtype in (("half_to_float", torch.float16), ("bfloat_to_float", torch.bfloat16)):
        got = run(library, name, outputs=65536, ctas=256, threads=256)
        values = torch.arange(65536).to(torch.uint16).view(dtype).float()
        expected = torch.where(values.isnan(), NAN, values.view(torch.int32).long()) & 0xFFFFFFFF
        assert got == expected.tolist()


def float_bits() -> list[int]:
    """Ties, limits and subnormals of fp16 and bf16, their neighbours, and random ones."""
    rng = random.Random(1)
    halves = [
        snippets.f(v) for v in (65504.0, 65519.0, 65520.0, 2**-14, 2**-24, 2**-25, 1.5 * 2**-25)
    ]
    near = [b + step for b in halves for step in (-1, 0, 1)] + [
        0,
        0x7F800000,
        0x7F7FFFFF,
        0x7FC00000,
    ]
    ties = [rng.getrandbits(31) & ~0x1FFF | 0x1000 for _ in range(400)]
    ties += [rng.getrandbits(31) & ~0xFFFF | 0x8000 for _ in range(200)]
    subnormal = [snippets.f(rng.getrandbits(11) * 2.0**-25) for _ in range(200)]
    bits = near + ties + subnormal + [rng.getrandbits(31) for _ in range(175)]
    return [b | sign << 31 for b in bits for sign in (0, 1)]


def test_floats_become_fp16_and_bf16(library: ptx_runs.Library) -> None:
    bits = float_bits()
    got = run(library, "float_to_halves", bits, outputs=len(bits), ctas=len(bits) // 2, threads=2)
    values = torch.tensor(bits).to(torch.uint32).view(torch.float32)
    nan = values.isnan()
    half = torch.where(nan, 0x7FFF, values.half().view(torch.int16).long()) & 0xFFFF
    bfloat = torch.where(nan, 0x7FFF, values.bfloat16().view(torch.int16).long()) & 0xFFFF
    assert got == (half + 65536 * bfloat).tolist()


def test_pairs_have_their_first_operand_in_the_high_half(library: ptx_runs.Library) -> None:
    words = [snippets.f(1.0), snippets.f(1 + 2**-8 + 2**-9), snippets.f(-65520.0)]
    got = run(library, "float_to_pairs", words, outputs=3, threads=3)
    truncated = [w >> 16 for w in words]
    half = [
        int(v) & 0xFFFF
        for v in torch.tensor([1.0, 1 + 2**-8 + 2**-9, -65520.0]).half().view(torch.int16)
    ]
    assert got == [t << 16 | h for t, h in zip(truncated, half)]


def test_loads_extend_and_stores_cut(library: ptx_runs.Library) -> None:
    assert run(library, "signed_bytes", [0x8100], outputs=1) == [0x0081FF81]


def test_vectors(library: ptx_runs.Library) -> None:
    got = run(library, "vectors", range(1, 9), outputs=12)
    assert got[:5] == [4, 3, 2, 1, 8]
    assert got[10:] == [7, 0]


@pytest.mark.parametrize("name", ["shared_addresses", "dynamic_shared"])
def test_shared_memory_has_a_generic_address(library: ptx_runs.Library, name: str) -> None:
    got = run(library, name, threads=32, shared=256)
    both = 0x101 if name == "shared_addresses" else 1
    assert got == [both * (t ^ 1) for t in range(32)]


def test_shared_memory_is_poisoned_for_every_cta(library: ptx_runs.Library) -> None:
    assert run(library, "poisoned_shared", ctas=4, threads=8) == [0xCDCDCDCD] * 32


def test_shared_memory_is_poisoned_after_a_failure(library: ptx_runs.Library) -> None:
    """Its other threads never came, and must not be awaited in the next launch."""
    with pytest.raises(ptx_runs.KernelError, match="the kernel stopped itself"):
        run(library, "poisoned_shared", threads=8, more=(1, 0))
    assert run(library, "poisoned_shared", ctas=4, threads=8) == [0xCDCDCDCD] * 32


def test_memory_and_control_flow(library: ptx_runs.Library) -> None:
    assert run(library, "local_depot", threads=32) == list(range(32))
    assert run(library, "tables", outputs=2, threads=2) == [snippets.f(2.0), snippets.f(4.0)]
    assert run(library, "param_address", outputs=1, more=(5, 8)) == [13]
    assert run(library, "scopes", outputs=1) == [1 + 2 + 2]
    expected = [sum(range(t + 1)) + 1000 * (t % 3 + 1) for t in range(32)]
    assert run(library, "branches", threads=32) == expected
    assert run(library, "halves", [0x00020001], outputs=1) == [1 + 1 + 1]
    assert run(library, "lane_registers", threads=32) == [0x100] * 32


def test_parameters_lie_as_in_a_struct(library: ptx_runs.Library) -> None:
    room = torch.zeros(8, dtype=torch.int64)
    args = struct.pack("@QHIBQ", room.data_ptr(), 0x8001, 7, 0x92, 1 << 40)
    library("separate_params", args)
    assert room.tolist()[:4] == [0x8001 << 32 | 7, 0x92, 1 << 40, room.data_ptr()]


@pytest.mark.parametrize("shape", matrices.SHAPES, ids=str)
def test_matrices_are_moved_by_a_warp(library: ptx_runs.Library, shape: tuple[int, bool]) -> None:
    for opcode, expected in (("ldmatrix", matrices.loaded), ("stmatrix", matrices.stored)):
        got = run(library, matrices.name(opcode, *shape), outputs=128, threads=32, shared=512)
        assert got == expected(*shape), opcode


def test_a_module_keeps_its_variables(library: ptx_runs.Library) -> None:
    first = run(library, "module_counter", threads=2, outputs=2)
    assert first == [5, 7]
    assert run(library, "module_counter", threads=2, outputs=2) == [9, 11]


def shuffled(mode: str, lane: int, b: int, c: int) -> int:
    """A shuffle as the PTX ISA writes it down; a lane gave its number and some high bits."""
    clamp, kept = c & 31, c >> 8 & 31
    least = lane & kept
    limit = least | clamp & ~kept
    source = {
        "up": lane - (b & 31),
        "down": lane + (b & 31),
        "bfly": lane ^ b & 31,
        "idx": least | b & 31 & ~kept,
    }[mode]
    in_range = source >= limit if mode == "up" else source <= limit
    return ((source if in_range else lane) ^ 0xABC0) | in_range << 16


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(library: ptx_runs.Library, mode: str) -> None:
    for width in (32, 16, 4):
        for b in (0, 1, 3, 5, 16, 31, 35):
            c = 32 - width << 8 | (0 if mode == "up" else 31)
            got = run(library, f"shuffle_{mode}", [b, c], threads=32)
            assert got == [shuffled(mode, lane, b, c) for lane in range(32)], (width, b)


def test_votes(library: ptx_runs.Library) -> None:
    ones, mixed = [1] * 32, [0] * 31 + [1]
    assert run(library, "votes", ones, threads=32) == [0xFFFFFFFF] + [1 + 4] * 31
    assert run(library, "votes", mixed, threads=32) == [0x80000000] + [1] * 31
    assert run(library, "votes", [0] * 32, threads=32) == [0] + [2 + 4] * 31


def test_reductions_over_a_warp(library: ptx_runs.Library) -> None:
    words = [random.Random(2).getrandbits(32) | 0x10 for _ in range(32)]
    expected = {"add": sum(words) & 0xFFFFFFFF, "max": max(words), "or": 0, "and": -1, "xor": 0}
    expected["min"] = min(snippets.s(w) for w in words) & 0xFFFFFFFF
    for word in words:
        expected["or"] |= word
        expected["and"] &= word
        expected["xor"] ^= word
    for name, value in expected.items():
        assert run(library, f"redux_{name}", words, threads=32) == [value] * 32, name


def test_float_reductions_over_a_warp(library: ptx_runs.Library) -> None:
    f = snippets.f
    words = [f(-float(i)) for i in range(32)]
    assert run(library, "redux_fmax", words, threads=32)[0] == f(-0.0)
    assert run(library, "redux_fmax_abs", words, threads=32)[0] == f(31.0)
    assert run(library, "redux_fmin_nan", words, threads=32)[0] == f(-31.0)
    words[7] = f(math.nan)
    assert run(library, "redux_fmax", words, threads=32)[0] == f(-0.0)
    assert run(library, "redux_fmin_nan", words, threads=32)[0] == NAN
    assert run(library, "redux_fmax", [0x7F800001] * 32, threads=32)[0] == NAN


def test_atomics(library: ptx_runs.Library) -> None:
    def after(name: str, start: int, threads: int = 64) -> list[int]:
        return run(library, f"atomic_{name}", [0, 0], outputs=4, start=start, threads=threads)

    assert after("add_u64", 0xFFFFFFFF)[:2] == [sum(range(3, 67)) - 1, 0]
    assert after("add_triton", 0)[:2] == [sum(range(3, 67)), 0]
    assert after("min_u64", 0xFFFFFFFF)[:2] == [3, 0]
    assert after("max_s32", 0xFFFFFFFF)[0] == 66
    assert after("exch_b64", 9, threads=1) == [3, 0, 9, 9]
    assert after("cas_b32", 77)[0] == 3
    assert after("cas_b32", 78)[0] == 78
    assert after("or_b32", 128)[0] == 128 + 127
    assert after("and_b32", 0xFFFFFFFF, threads=1)[0] == 3
    assert after("inc_u32", 0, threads=3)[0] == 3
    assert run(library, "shared_atomic", threads=32) == [sum(range(32))] * 32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("misaligned", r"kernels.ptx:\d+: .*8 bytes is misaligned: expected a multiple of 8, got"),
        ("misaligned_shared", r"4 bytes is misaligned: expected a multiple of 4"),
        ("past_shared", r"outside of memory"),
        ("past_param", r"outside of memory: expected an address below 0x18, got 0x18"),
        ("null", r"outside of memory"),
        ("trapped", r"kernels.ptx:\d+: the kernel stopped itself"),
    ],
)
def test_a_wrong_access_is_an_error(library: ptx_runs.Library, name: str, message: str) -> None:
    with pytest.raises(ptx_runs.KernelError, match=message):
        run(library, name)


def test_loads_and_stores_of_global_memory_are_counted(library: ptx_runs.Library) -> None:
    run(library, "one_copy", range(32), threads=32)
    assert library.traffic == (128, 128)
    run(library, "vectors")
    assert library.traffic == (32, 64)


@pytest.mark.parametrize(
    "name", ["tables", "shared_addresses", "dynamic_shared", "local_depot", "param_address"]
)
def test_other_memory_is_not_counted(library: ptx_runs.Library, name: str) -> None:
    run(library, name, threads=2, shared=256)
    assert library.traffic == (0, 32)
