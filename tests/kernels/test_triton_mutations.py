"""Bugs in Triton's output: the translator refuses it, or the comparison finds them.

Some are planted in a copy of the kernels' source, others in the PTX itself. The interpreter would
not show any of them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import emulated_triton
import zcomm
from contract_data import CASES, assert_same_outcome, reference, run_case
from emulated_triton import Kernel, Kernels
from triton_compiler import Target
from zcomm import WireError, kernels

pytestmark = pytest.mark.skipif(not emulated_triton.FOUND, reason=emulated_triton.NO_TRITON)
PACKAGE = "zcomm.kernels.triton"
INSTALLED = Path(zcomm.__file__).parent / "kernels" / "triton"
TARGET = Target("cuda", 90)
ENCODE = "encode_int4_128"
SOME = [case for case in CASES if case.n in (1, 33, 129, 1153)]


def register(name: str, own: dict[str, Kernel]) -> str:
    """A kernel set with these variants in place of the correct ones."""
    from zcomm.kernels.triton import TritonKernels

    right = emulated_triton.zcomm_kernels(TARGET)

    def launch(variant: Any, programs: int, arguments: Sequence[int]) -> None:
        kernel = own.get(variant.name) or right.load(variant.name)
        kernel.launch((programs,), arguments)

    kernels.register(name, TritonKernels(name, launch))
    return name


def compare(name: str, codec: str = "int4") -> None:
    for case in SOME:
        got = run_case(name, codec, torch.float32, torch.float32, case)
        assert_same_outcome(got, reference(codec, torch.float32, torch.float32, case), case)


def assert_found(name: str, codec: str = "int4") -> None:
    """By the comparison, or earlier by a decoder that refuses the wire."""
    with pytest.raises((AssertionError, WireError), match="expected"):
        compare(name, codec)


@pytest.mark.parametrize("codec", ["int4", "topk:0.3"])
def test_unchanged_kernels_pass(codec: str) -> None:
    compare(register("unchanged", {}), codec)


# ---- In the source ----


def changed_kernels(folder: Path, file: str, old: str, new: str) -> Kernels:
    """The kernels of a changed copy of the package, under another name."""
    package = folder / "changed"
    shutil.copytree(INSTALLED, package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (package / file).read_text()
    assert text.count(old) == 1, f"{file}: expected {old!r} once, got {text.count(old)}"
    (package / file).write_text(text.replace(old, new))
    for path in package.glob("*.py"):
        path.write_text(path.read_text().replace(PACKAGE, "changed"))
    sources = tuple(sorted(package.glob("*.py")))
    return Kernels("changed.registry", TARGET, sources, (str(folder),))


def test_an_approximate_division_is_refused(tmp_path: Path) -> None:
    ratio = "from_bits(peak)", "tl.full(peak.shape, MOST, tl.float32)"
    exact, inexact = "tl.div_rn({}, {})".format(*ratio), "({} / {})".format(*ratio)
    with pytest.raises(RuntimeError, match=r"\.(full|approx) is not IEEE arithmetic"):
        changed_kernels(tmp_path, "uniform.py", exact, inexact).load(ENCODE)


def test_a_fused_multiply_and_add_is_found(tmp_path: Path) -> None:
    fused = (
        "tl.fma(g, from_bits((raw * 0 + prescale).to(tl.int32)), residual_value(raw, old, kind))"
    )
    changed = changed_kernels(
        tmp_path, "values.py", "v = v + residual_value(raw, old, kind)", f"v = {fused}"
    )
    assert_found(register("fused", {ENCODE: changed.load(ENCODE)}))


def test_a_compiler_that_may_fuse_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"of floats without \.rn may be fused"):
        emulated_triton.zcomm_kernels(TARGET, enable_fp_fusion=True).load(ENCODE)


# ---- In the PTX ----


def changed_ptx(folder: Path, change: Callable[[str], str], name: str = ENCODE) -> Kernel:
    right = emulated_triton.zcomm_kernels(TARGET)
    (compiled,) = right.compiled([name])
    text = Path(compiled.assembly).read_text()
    path = folder / "changed.ptx"
    path.write_text(change(text))
    assert path.read_text() != text
    compiled = replace(compiled, assembly=str(path))
    return Kernel(replace(right, cache=folder).library(compiled), compiled)


def test_a_wrong_lane_is_found(tmp_path: Path) -> None:
    def change(ptx: str) -> str:
        return re.sub(r"(shfl\.sync\.bfly\.b32 .*), 4, 31, -1;", r"\1, 8, 31, -1;", ptx)

    assert_found(register("wrong lane", {ENCODE: changed_ptx(tmp_path, change)}))


def test_a_missing_barrier_is_found(tmp_path: Path) -> None:
    """In a kernel with eight warps, which run as far apart as barriers allow."""

    def change(ptx: str) -> str:
        return re.sub(r"bar\.sync\s+0;", "", ptx)

    kernel = changed_ptx(tmp_path, change, "topk_write")
    assert_found(register("no barrier", {"topk_write": kernel}), "topk:0.3")


def test_another_rounding_is_found(tmp_path: Path) -> None:
    """Adding and subtracting an odd number rounds halves to odd integers."""

    def change(ptx: str) -> str:
        return re.sub(r"\b0f([4C])B400000\b", r"0f\1B400001", ptx)

    assert_found(register("halves to odd", {ENCODE: changed_ptx(tmp_path, change)}))
