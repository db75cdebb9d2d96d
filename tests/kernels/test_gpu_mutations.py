"""Bugs planted in the CUDA kernels: the comparison with the reference must find each one.

Each test builds a kernel for the emulator from a changed copy of csrc, for blocks of up to 128
elements, and runs the contract's cases. If the comparison misses a planted bug, it would miss real
ones too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import emulated
from planted_bugs import BUGS, ONE_ROW, Bug, assert_found, compare, kernel_set


@pytest.mark.parametrize("codec", ONE_ROW)
def test_unchanged_kernels_pass(codec: str, tmp_path: Path) -> None:
    compare(kernel_set(tmp_path, codec), codec)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    assert_found(kernel_set(tmp_path, bug.codec, bug), bug.codec)


@pytest.mark.skipif(emulated.NVCC is None, reason=emulated.NO_NVCC)
def test_a_bug_is_found_through_ptx(tmp_path: Path) -> None:
    """nvcc's output passes without the bug and fails with it."""
    bug = BUGS[-1]
    for folder in ("unchanged", "changed"):
        (tmp_path / folder).mkdir()
    compare(kernel_set(tmp_path / "unchanged", bug.codec, arch=80), bug.codec)
    assert_found(kernel_set(tmp_path / "changed", bug.codec, bug, arch=80), bug.codec)
