"""Bugs to plant into the CUDA kernels, and the comparison that must find them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import emulated
from contract_data import CASES, assert_same_outcome, reference, run, run_case
from zcomm import WireError, kernels
from zcomm.kernels.cuda import CudaKernels

# Which text of a kernel file makes its kernels, and what makes those for one row of 128 elements.
ONE_ROW = {
    "int4": ("ZC_BLOCK_KERNELS(int4, zcomm::Int4)", "ZC_BLOCK_KERNELS_OF(int4, zcomm::Int4, 1)"),
    "lm4": ("ZC_BLOCK_KERNELS(lm4, zcomm::Lm<4>)", "ZC_BLOCK_KERNELS_OF(lm4, zcomm::Lm<4>, 1)"),
    "sign": ("ZC_BLOCK_KERNELS(sign, zcomm::Sign)", "ZC_BLOCK_KERNELS_OF(sign, zcomm::Sign, 1)"),
}


@dataclass(frozen=True)
class Bug:
    """`old` occurs once in `file`; with `new` in its place the kernels of `codec` are wrong."""

    name: str
    codec: str
    file: str
    old: str
    new: str


BUGS = [
    Bug(
        "halves are rounded up",
        "int4",
        "codec/uniform.h",
        "std::nearbyintf(v * inverse)",
        "std::floor(v * inverse + 0.5f)",
    ),
    Bug(
        "the scale is cut off",
        "int4",
        "codec/float.h",
        "(u + 0x7fffu + ((u >> 16) & 1u)) >> 16",
        "u >> 16",
    ),
    Bug(
        "nibbles are swapped on their way out",
        "int4",
        "cuda/uniform.h",
        "(Format::to_wire(code) & mask) << (kCodeStride<Width> * j)",
        "(Format::to_wire(code) & mask) << (kCodeStride<Width> * (j ^ 1))",
    ),
    Bug(
        "nibbles are swapped on their way in",
        "int4",
        "cuda/uniform.h",
        "Format::value(codes >> (kCodeStride<Width> * j)",
        "Format::value(codes >> (kCodeStride<Width> * (j ^ 1))",
    ),
    Bug(
        "the last block is one element short",
        "int4",
        "cuda/warp.h",
        "left < (1 << log2) ? left : 1 << log2",
        "left < (1 << log2) ? left - 1 : 1 << log2",
    ),
    Bug(
        "a multiply and an add are fused",
        "int4",
        "cuda/encode.h",
        "scaled + r[j]",
        "std::fma(g[j], gradient.prescale, r[j])",
    ),
    Bug(
        "a stride of the Hadamard transform is a half of what it should be",
        "lm4",
        "cuda/warp.h",
        "__shfl_xor_sync(kAllLanes, t[r][j], h)",
        "__shfl_xor_sync(kAllLanes, t[r][j], h == 16 ? 8 : h)",
    ),
    Bug(
        "a stride of the tree is a half of what it should be",
        "lm4",
        "cuda/warp.h",
        "__shfl_xor_sync(kAllLanes, sum, high)",
        "__shfl_xor_sync(kAllLanes, sum, high / 2)",
    ),
    # The sum is the same but for its roundings.
    Bug(
        "the tree adds other pairs",
        "sign",
        "cuda/warp.h",
        "kept + __shfl_xor_sync(kAllLanes, sent, high)",
        "kept + __shfl_xor_sync(kAllLanes, sent, high / 2)",
    ),
]


def planted(folder: Path, codec: str, bug: Bug | None = None) -> Path:
    """A copy of csrc with the bug, and with one kernel of each kind in the codec's file."""
    csrc = folder / "csrc"
    shutil.copytree(emulated.ROOT / "csrc", csrc, ignore=shutil.ignore_patterns("tests"))
    _replace(csrc / "cuda" / f"{codec}.cu", *ONE_ROW[codec])
    if bug is not None:
        _replace(csrc / bug.file, bug.old, bug.new)
    return csrc


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name}: expected {old!r} once, got {text.count(old)}"
    path.write_text(text.replace(old, new))


def kernel_set(folder: Path, codec: str, bug: Bug | None = None, arch: int = 0) -> str:
    """The name of a new kernel set: layouts keep what they know of a set by its name."""
    build = emulated.Build(arch=arch, kernels=(codec,))
    path = emulated.build_mutant(build, planted(folder, codec, bug), folder)
    kernels.register(str(path), CudaKernels(emulated.load_file(path), str(path)))
    return str(path)


def compare(name: str, codec: str) -> None:
    """Without the empty cases: their frames are left to another codec's kernel."""
    for case in (case for case in CASES if case.n):
        got = run_case(name, codec, torch.float32, torch.float32, case)
        assert_same_outcome(got, reference(codec, torch.float32, torch.float32, case), case)
    means = means_at_ties(128 * 64)
    assert_same_outcome(run(name, codec, means, None), run("reference", codec, means, None), "ties")


def means_at_ties(n: int) -> Tensor:
    """Blocks whose mean lies between two bf16 numbers, so that a sum's last bit decides."""
    x = torch.randn(n // 128, 128, generator=torch.Generator().manual_seed(1)).double().abs()
    mean = x.mean(1).float().view(torch.int32)
    tie = (mean & -0x10000 | 0x8000).view(torch.float32)
    largest = x.argmax(1, keepdim=True)
    x.scatter_add_(1, largest, 128 * (tie.double() - x.mean(1)).unsqueeze(1))
    return x.float().flatten()


def assert_found(name: str, codec: str) -> None:
    """By the comparison, or already by a decoder that refuses the wire."""
    with pytest.raises((AssertionError, WireError), match="expected"):
        compare(name, codec)
