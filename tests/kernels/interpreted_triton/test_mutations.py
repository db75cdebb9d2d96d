"""Bugs planted in the Triton kernels: the comparison with the reference must find each one.

A changed copy of the package replaces the installed one in the interpreter. A comparison that
misses a planted bug would miss real ones too.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import interpreted
import zcomm.kernels
from contract_data import CASES, assert_same_outcome, reference, run, run_case
from planted_bugs import means_at_ties
from zcomm import WireError, kernels

PACKAGE = "zcomm.kernels.triton"
INSTALLED = Path(zcomm.kernels.__file__).parent / "triton"
# Short and long blocks, NaN and Inf (every fourth turn), all prescales.
SOME = [case for case in CASES if case.n in (1, 33, 129, 1153)]


@dataclass(frozen=True)
class Bug:
    """`old` occurs once in `file`; replacing it with `new` breaks the kernels of `codec`."""

    name: str
    codec: str
    file: str
    old: str
    new: str


BUGS = [
    Bug(
        "halves are rounded up",
        "int4",
        "uniform.py",
        "(v * inverse(scale)[:, None] + ROUND) - ROUND",
        "tl.floor(v * inverse(scale)[:, None] + 0.5)",
    ),
    Bug(
        "the scale is cut off",
        "int4",
        "bits.py",
        "(u + 0x7FFF + ((u >> 16) & 1)) >> 16",
        "u >> 16",
    ),
    Bug(
        "nibbles are swapped on their way out",
        "int4",
        "codes.py",
        "tl.sum(grouped << shifts, 2)",
        "tl.sum(grouped << (shifts ^ WIDTH), 2)",
    ),
    Bug(
        "nibbles are swapped on their way in",
        "int4",
        "codes.py",
        "tl.expand_dims(packed, 2) >> shifts",
        "tl.expand_dims(packed, 2) >> (shifts ^ WIDTH)",
    ),
    Bug(
        "the last block is one element short",
        "int4",
        "tile.py",
        "tl.minimum(tl.load(row + N) - first, TILE)",
        "tl.minimum(tl.load(row + N) - first - 1, TILE)",
    ),
    Bug(
        "a multiply and an add are fused",
        "int4",
        "values.py",
        "v = v + residual_value(raw, old, kind)",
        "v = tl.fma(g, from_bits(raw * 0 + prescale), residual_value(raw, old, kind))",
    ),
    Bug(
        "a residual that must stay is overwritten",
        "int4",
        "values.py",
        "tl.where(kept, raw, bits(e))",
        "bits(e)",
    ),
    # The same transform, but with different rounding.
    Bug(
        "the strides of the Hadamard transform go down",
        "lm4",
        "block.py",
        "butterfly(t, i, ROWS, LOG2)",
        "butterfly(t, LOG2 - 1 - i, ROWS, LOG2)",
    ),
    Bug(
        "the tree adds neighbours",
        "sign",
        "block.py",
        "pairs = tl.reshape(t, (ROWS, 1 << i, 2, 1 << (LOG2 - 1 - i)))",
        "pairs = tl.reshape(t, (ROWS, 1 << (LOG2 - 1 - i), 2, 1 << i))",
    ),
    Bug(
        "words of the checksum weigh too little",
        "none",
        "frame.py",
        "(2 * (byte >> 3) + 1)",
        "(2 * (byte >> 3))",
    ),
    Bug(
        "ties go to higher elements",
        "topk:0.3",
        "topk_write.py",
        "ranks(equal, ROWS, LOG2) < ties",
        "ranks(equal, ROWS, LOG2) <= ties",
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for a changed package; restores the installed one afterward."""
    installed = _loaded()
    yield tmp_path
    if str(tmp_path) in zcomm.kernels.__path__:
        zcomm.kernels.__path__.remove(str(tmp_path))
    for name in _loaded():
        del sys.modules[name]
    sys.modules.update(installed)
    zcomm.kernels.triton = installed[PACKAGE]


def _loaded() -> dict[str, object]:
    return {name: m for name, m in sys.modules.items() if f"{name}.".startswith(f"{PACKAGE}.")}


def kernel_set(folder: Path, bug: Bug | None) -> str:
    """The name of a new kernel set: layouts cache plans by the set's name."""
    shutil.copytree(INSTALLED, folder / "triton", ignore=shutil.ignore_patterns("__pycache__"))
    if bug is not None:
        path = folder / "triton" / bug.file
        text = path.read_text()
        assert text.count(bug.old) == 1, f"{bug.file}: expected {bug.old!r} once"
        path.write_text(text.replace(bug.old, bug.new))
    for name in _loaded():
        del sys.modules[name]
    zcomm.kernels.__path__.insert(0, str(folder))
    kernels.register(str(folder), interpreted.new_kernels(str(folder)))
    assert Path(sys.modules[f"{PACKAGE}.bits"].__file__ or "").parent == folder / "triton"
    return str(folder)


def compare(name: str, codec: str) -> None:
    for case in SOME:
        got = run_case(name, codec, torch.float32, torch.float32, case)
        assert_same_outcome(got, reference(codec, torch.float32, torch.float32, case), case)
    means = means_at_ties(128 * 64)
    assert_same_outcome(run(name, codec, means, None), run("reference", codec, means, None), "ties")


@pytest.mark.parametrize("codec", sorted({bug.codec for bug in BUGS}))
def test_unchanged_kernels_pass(codec: str, folder: Path) -> None:
    compare(kernel_set(folder, None), codec)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, folder: Path) -> None:
    """By the comparison, or earlier by a decoder that refuses the wire."""
    name = kernel_set(folder, bug)
    with pytest.raises((AssertionError, WireError), match="expected"):
        compare(name, bug.codec)
