"""Triton's output for zcomm's kernels: the contract on the emulator, and the machine code.

These take minutes. `make gpu-proof` runs the whole contract on all architectures and variants.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import emulated
import emulated_triton
from contract_data import Case, Outcome, assert_same_outcome, inputs, reference
from emulated_triton import Kernels
from triton_compiler import Compiled, Target
from triton_process import CONTRACT, run_pytest
from zcomm import codec, kernels

TOOLS = emulated.ROOT / "tools"
if str(TOOLS) not in sys.path:
    sys.path.append(str(TOOLS))

from gpu import machine_code, triton_gates  # noqa: E402

pytestmark = pytest.mark.skipif(not emulated_triton.FOUND, reason=emulated_triton.NO_TRITON)
needs_tools = pytest.mark.skipif(bool(machine_code.missing()), reason=machine_code.missing())
# The emulator's schedules, each with a seed.
FORWARD, REVERSE, RANDOM = (0, ctypes.c_uint64(1)), (1, ctypes.c_uint64(1)), (2, ctypes.c_uint64(7))
NVIDIA_VARIANTS = ("encode_int4_128", "decode_int4_128", "decode_lm4_128", "topk_write")
AMD_VARIANTS = ("encode_int4_128", "decode_int4_128", "topk_digit_0")


def test_compiled_kernels() -> None:
    run_pytest("ptx90", CONTRACT)


@pytest.fixture
def any_order() -> Iterator[ctypes.CDLL]:
    """The emulator; restores the usual thread order afterward."""
    emulator = emulated_triton.emulator()
    yield emulator
    emulator.emulator_set_schedule(*FORWARD)


@pytest.mark.parametrize("spec", ["none", "int4", "sign", "lm4", "topk:0.3"])
def test_the_order_of_threads_changes_nothing(spec: str, any_order: ctypes.CDLL) -> None:
    """With residuals updated in place: no thread may read what another has already written."""
    kernels.register("triton:any order", emulated_triton.new_kernels("triton:any order", 90))
    c, case = codec(spec), Case(1153, 3)
    for storage in (torch.float32, torch.int8):
        grad, old = inputs(spec, torch.float32, storage, case)
        expected = reference(spec, torch.float32, storage, case)
        assert old is not None
        for order in (FORWARD, REVERSE, RANDOM):
            any_order.emulator_set_schedule(*order)
            residual = old.clone()
            wire = c.encode(grad, residual, prescale=case.prescale, kernels="triton:any order")
            decoded = c.decode(wire, case.n, kernels="triton:any order")
            assert_same_outcome(Outcome(wire, residual, decoded), expected, order)


# ---- Machine code ----


def uses(kernels: Kernels, names: Sequence[str]) -> list[triton_gates.Use]:
    compiled = replace(kernels, assembled=True).compiled(names)
    return triton_gates.uses(kernels.target.name, compiled)


@needs_tools
def test_kernels_for_nvidia_fit_into_registers() -> None:
    found = uses(emulated_triton.zcomm_kernels(Target("cuda", 90)), NVIDIA_VARIANTS)
    assert [use.failure for use in found if use.failure] == []
    assert min(use.registers for use in found) > 0


def test_kernels_for_amd_fit_into_registers() -> None:
    found = uses(emulated_triton.zcomm_kernels(Target("hip", "gfx942")), AMD_VARIANTS)
    assert [use.failure for use in found if use.failure] == []
    assert min(use.registers for use in found) > 0


@needs_tools
def test_a_kernel_that_spills_is_refused() -> None:
    tests, target = emulated.ROOT / "emulator" / "tests", Target("cuda", 90)
    samples = Kernels("triton_samples", target, (tests / "triton_samples.py",), (str(tests),))
    (use,) = uses(samples, ["spill"])
    assert use.failure.startswith("spill sm_90: expected all in registers, got ")
    assert use.stack > 0
    assert list(triton_gates.rows([use]))[1][1].endswith(f" + {use.stack} B")


def test_spills_of_amd_are_told_apart(tmp_path: Path) -> None:
    """Vector registers spill to memory, scalar registers to lanes of vector registers."""
    names = ("private_segment_fixed_size", "vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    one = Compiled("encode", "encode", str(tmp_path / "encode.amdgcn"), "", (), 64, 0)
    for figures, failure in (
        ((0, 90, 0, 0), ""),
        ((0, 90, 0, 7), ""),
        ((40, 90, 10, 0), "got 40 bytes of stack and 10 spilled registers"),
    ):
        text = "".join(f"    .{name}: {n}\n" for name, n in zip(names, figures))
        Path(one.assembly).write_text(text)
        (use,) = triton_gates.uses("gfx942", [one])
        assert (use.stack, use.registers, use.spills, use.scalar_spills) == figures
        assert use.failure.endswith(failure)
        assert bool(use.failure) == bool(failure)
