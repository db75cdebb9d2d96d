"""Every kernel set reproduces the checked-in vectors, so the format cannot change unnoticed."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from contract_data import NAMES
from kernel_sets import CONTRACT_SETS
from zcomm import codec
from zcomm.conformance import vectors

ROOT = Path(__file__).resolve().parents[2]
FILE = vectors.load()


@pytest.mark.parametrize("kernels", CONTRACT_SETS)
@pytest.mark.parametrize("vector", FILE["vectors"], ids=lambda v: f"{v['codec']}-{v['n']}")
def test_vector(vector: dict[str, Any], kernels: str) -> None:
    spec, n = vector["codec"], vector["n"]
    assert vectors.made(spec, FILE["inputs"][str(n)], FILE["prescale"], kernels) == vector
    checked_in = torch.tensor(list(bytes.fromhex(vector["wire"])), dtype=torch.uint8)
    assert vectors.words(codec(spec).decode(checked_in, n, kernels=kernels)) == vector["decoded"]


@pytest.mark.parametrize("part", ["wire", "residual", "decoded"])
def test_one_changed_bit_is_a_difference(part: str) -> None:
    assert vectors.differences(FILE, "cpu:scalar") == []
    changed = copy.deepcopy(FILE)
    text = changed["vectors"][7][part]
    changed["vectors"][7][part] = f"{int(text[0], 16) ^ 1:x}" + text[1:]
    assert vectors.differences(changed, "cpu:scalar") == [f"int8 of 131 elements: {part}"]


def test_every_codec_has_vectors() -> None:
    assert {codec(v["codec"]).name for v in FILE["vectors"]} == {codec(s).name for s in NAMES}


def test_file_is_what_the_reference_makes() -> None:
    script = ROOT / "tools" / "make_vectors.py"
    done = subprocess.run(
        [sys.executable, "-P", str(script), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
