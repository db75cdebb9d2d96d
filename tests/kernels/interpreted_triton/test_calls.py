"""What calls to the Triton kernels leave behind, and what tiles and tables must not change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import interpreted
from contract_data import SPECS, assert_same, assert_same_outcome, gradient
from hostile import good_wire, layout_of
from layout_data import encode
from zcomm import Layout, Segment, codec, kernels
from zcomm.kernels.base import KernelLayout
from zcomm.kernels.device import NO_FAULT, Stream, StreamMemory, new_faults
from zcomm.kernels.triton import TritonKernels
from zcomm.wire.header import CODEC_IDS

NAME = "triton:interpreted"
EVERY_CODEC = [Segment(codec(spec), 300 + i, 400 * i, i % 3) for i, spec in enumerate(SPECS)]


def test_one_call_serves_segments_of_all_codecs() -> None:
    layout = Layout(EVERY_CODEC, peers=4)
    grad = gradient(layout.span, ["normal", "ties", "NaN"], torch.float32, patch=900)
    residuals = [torch.randn(s.numel) for s in layout.segments]
    expected = encode(layout, grad, residuals, "reference")
    assert_same_outcome(encode(layout, grad, residuals, NAME), expected, "all codecs")


@pytest.mark.parametrize(("tile", "step"), [(1024, 256), (2048, 1024), (65536, 65536)])
@pytest.mark.parametrize("spec", ["int4", "lm3:block=1024", "none", "topk:0.3"])
def test_tile_size_changes_nothing(spec: str, tile: int, step: int) -> None:
    class Tiled(TritonKernels):
        step_elements = step  # type: ignore[assignment]

        def tile_elements(self, layout: KernelLayout) -> int:
            return tile

    name = f"triton:{tile}"
    kernels.register(name, Tiled(name, interpreted.launch))
    layout = Layout([Segment(codec(spec), 2 * 4096 + 77)])
    grad, residual = gradient(layout.span, ["normal", "ties"], torch.float32), [torch.ones(8269)]
    expected = encode(layout, grad, residual, "reference")
    assert_same_outcome(encode(layout, grad, residual, name), expected, f"tiles of {tile}")


def test_counters_are_zero_after_a_call() -> None:
    """Checksums, tiles and histograms, even after a refused wire; everything else is set before
    it is read."""
    layout = layout_of("mixed", 300)
    for bad in (False, True):
        wire = layout.encode(torch.randn(layout.span), kernels=NAME)
        wire[40] ^= int(bad)
        faults = new_faults(torch.device("cpu"))
        layout.decode_sum([wire, wire], faults=faults, kernels=NAME)
        assert (faults.item() == NO_FAULT) != bad
        frames, segments = len(layout.frames), len(layout.segments)
        scratch = memory_of(layout)._scratch
        assert not scratch["decode"].any()
        words = scratch["encode"].view(torch.int64)
        assert not words[: 2 * frames].any()
        histograms = words[2 * frames + segments :][: 4 * 256 + 1]
        assert not histograms.any()


def test_a_second_call_uploads_and_allocates_nothing() -> None:
    layout = Layout(EVERY_CODEC, peers=3)
    grad = torch.randn(layout.span)
    wires = [layout.encode(grad, kernels=NAME) for _ in range(3)]
    layout.decode_sum(wires, kernels=NAME)
    before = addresses(layout)
    layout.encode(grad, out=wires[0], kernels=NAME)
    layout.decode_sum(wires, kernels=NAME)
    assert addresses(layout) == before


def addresses(layout: Layout) -> list[int]:
    memory = memory_of(layout)
    tensors = [memory._table, *memory._scratch.values(), *memory._address_tables.values()]
    return [t.data_ptr() for t in tensors if t is not None]


def memory_of(layout: Layout) -> StreamMemory:
    return layout.device_plans[NAME].memory.on(Stream(torch.device("cpu")))


@pytest.mark.parametrize("spec", ["int4", "lm4", "bf16", "topk:0.3"])
def test_many_wires_at_any_distance(spec: str) -> None:
    c, n = codec(spec), 200
    grads = [gradient(n, ["normal"], torch.float32, seed=i) for i in range(70)]
    wires = [c.encode(grad, kernels="reference") for grad in grads]
    expected = c.decode_sum(wires, n, kernels="reference")
    assert_same(c.decode_sum(wires, n, kernels=NAME), expected, "in tensors of their own")
    assert_same(c.decode_sum(torch.stack(wires), n, kernels=NAME), expected, "in rows of one")
    twice = [wires[0]] * 2
    again = c.decode_sum(twice, n, kernels="reference")
    assert_same(c.decode_sum(twice, n, kernels=NAME), again, "one wire twice")


def test_too_many_wires() -> None:
    wire = codec("int4").encode(torch.ones(3))
    with pytest.raises(ValueError, match="expected at most 4096 wires, got 4097; use 'reference'"):
        codec("int4").decode_sum([wire] * 4097, 3, kernels=NAME)


def fault(wire: Tensor, spec: str, n: int) -> tuple[int, int, int, int]:
    """Stage, wire, kind and detail of the fault in the second of two wires."""
    faults, layout = new_faults(torch.device("cpu")), layout_of(spec, n)
    good = good_wire(spec, n)
    layout.decode_sum([good, wire], verify=False, faults=faults, kernels=NAME)
    value = int(faults.item()) & (1 << 64) - 1
    return value >> 62, value >> 48 & 0x3FFF, value >> 16 & 0xFF, value & 0xFFFF


FIELDS = [(0, 0), (4, 1), (6, 2), (7, 3), (8, 5), (15, 5), (16, 6), (20, 7)]


@pytest.mark.parametrize(("byte", "field"), FIELDS)
def test_header_faults_have_the_numbers_of_the_cuda_kernels(byte: int, field: int) -> None:
    """The first wrong field counts, although all later ones are wrong too."""
    bad = good_wire("int4", 37)
    bad[byte] ^= 0x40
    bad[byte + 1 : 24] ^= 0x40
    assert fault(bad, "int4", 37) == (0, 1, 0, field)


def test_absent_checksum_must_be_zero() -> None:
    bad = layout_of("int4", 37).encode(torch.ones(37), verify=False)
    bad[24] = 1
    assert fault(bad, "int4", 37) == (0, 1, 0, 8)


BODIES = [
    ("int4", 37, 32, [0x01, 0x00], 2, 0x0001),  # an invalid scale
    ("int4", 37, 48, [0x08], 3, 0),  # an invalid code
    ("int4", 37, 32, [0xC0, 0x7F], 4, 0x7FC0),  # codes in a NaN block
    ("int4", 37, 48 + 18, [0xF0], 5, 0),  # an unused nibble
    ("int4", 37, 34, [1], 5, 0),  # padding of the scales
    ("none", 37, 32 + 148, [1], 5, 0),
    ("topk:0.3", 37, 32, [38], 6, 0),
    ("topk:0.3", 37, 32, [11], 8, 0),
    ("topk:0.3", 37, 70, [40, 0], 9, 40),
    ("topk:0.3", 37, 80, [0x80, 0x7F], 10, 0x7F80),
    ("topk:0.3", 37, 32, [0xFF] * 4, 11, 0),
]


@pytest.mark.parametrize(("spec", "n", "at", "new", "kind", "detail"), BODIES)
def test_body_faults_have_the_numbers_of_the_cuda_kernels(
    spec: str, n: int, at: int, new: list[int], kind: int, detail: int
) -> None:
    bad = good_wire(spec, n)
    bad[at : at + len(new)] = torch.tensor(new, dtype=torch.uint8)
    assert fault(bad, spec, n) == (2, 1, kind, detail)


def test_launches_of_a_call() -> None:
    """One per codec and block size, and seven to encode topk, whatever the segments."""
    launched: list[str] = []

    def note(variant: object, programs: int, arguments: object) -> None:
        launched.append(variant.name)  # type: ignore[attr-defined]

    for copies in (1, 3):
        launched.clear()
        kernels.register(f"noted:{copies}", TritonKernels(f"noted:{copies}", note))
        layout = Layout([Segment(s.codec, s.numel, s.offset + 9999 * i, s.peer)
                         for i in range(copies) for s in EVERY_CODEC])  # fmt: skip
        layout.encode(torch.zeros(layout.span), kernels=f"noted:{copies}")
        blocks = [s for s in SPECS if not s.startswith("topk")]
        assert len(launched) == len(blocks) + 7
        assert len({name for name in launched if "topk" in name}) == 7
    assert CODEC_IDS["topk"] == 11
