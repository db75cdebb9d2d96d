"""Every kernel set gives the checked-in vectors: the format cannot change unnoticed."""

from __future__ import annotations

import json

import pytest
import torch

from contract_data import NAMES
from kernel_sets import KERNEL_SETS
from vectors import make
from zcomm import codec

FILE = json.loads(make.PATH.read_text())


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("vector", FILE["vectors"], ids=lambda v: f"{v['codec']}-{v['n']}")
def test_vector(vector: dict[str, str], kernels: str) -> None:
    c, n = codec(vector["codec"]), int(vector["n"])
    given = FILE["inputs"][str(n)]
    grad, residual = make.values(given["input"]), make.values(given["residual"])
    factor = make.values(FILE["prescale"]).item()
    wire = c.encode(grad, residual, prescale=factor, kernels=kernels)
    assert bytes(wire.tolist()).hex() == vector["wire"]
    assert make.words(residual) == vector["residual"]
    checked_in = torch.tensor(list(bytes.fromhex(vector["wire"])), dtype=torch.uint8)
    assert make.words(c.decode(checked_in, n, kernels=kernels)) == vector["decoded"]


def test_every_codec_has_vectors() -> None:
    assert {codec(v["codec"]).name for v in FILE["vectors"]} == {codec(s).name for s in NAMES}


def test_file_is_what_the_reference_makes() -> None:
    assert make.text() == make.PATH.read_text()
