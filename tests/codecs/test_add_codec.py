"""A toy codec, added as CONTRIBUTING.md says: one class for all of it, one line in KNOWN."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import zcomm
from contract_data import CASES, GRAD_DTYPES, STORAGES, assert_same_outcome, reference, run_case
from ranks import run_ranks
from zcomm import Layout, Residuals, Segment, WireError, codec, codecs, kernels
from zcomm.codecs import arithmetic as ar
from zcomm.codecs.blocks import BlockFormat
from zcomm.codecs.format import refuse


class Tern(BlockFormat):
    """s = bf16(absmax);  code = 1 where v > s/2, 3 where v < -s/2, else 0."""

    name = "tern"
    id = 12
    error = 0.6
    needs_feedback = True
    default_feedback = True
    width = 2

    def quantise(self, v: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
        scale = ar.bf16_bits(peak.view(torch.float32))
        half = (ar.bf16_value(scale) * 0.5).unsqueeze(1)
        return scale, (v > half).int() + 3 * (v < -half).int()

    def values(self, codes: Tensor) -> Tensor:
        return ((codes ^ 2) - 2).to(torch.float32)  # two's complement: 3 is -1

    def check_codes(self, codes: Tensor) -> None:
        refuse(codes == 2, "expected codes 0, 1 and 3, got code", codes)


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(codecs.KNOWN, Tern.name, Tern)
    monkeypatch.setenv("ZCOMM_KERNELS", "reference")
    kernels._select.cache_clear()  # earlier tests chose without the variable
    yield
    kernels._select.cache_clear()


def test_its_class_says_everything_about_it() -> None:
    c = codec("tern:block=64")
    assert (c.name, c.id, c.spec, c.block) == ("tern", 12, "tern:block=64", 64)
    assert (c.needs_feedback, c.default_feedback, c.error) == (True, True, 0.6)
    assert c.body_nbytes(128) == 16 + 32
    with pytest.raises(ValueError, match="codec tern: expected the option block= one of"):
        codec("tern:7")
    with pytest.raises(ValueError, match="expected True or a decay with codec 'tern'"):
        zcomm.sharding.settings.Settings("tern", feedback=False).mode(codec("tern"))


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_the_contract_holds(dtype: torch.dtype, storage: torch.dtype | None) -> None:
    for case in CASES:
        got = run_case("reference", "tern", dtype, storage, case)
        assert_same_outcome(got, reference("tern", dtype, storage, case), case)


def test_the_residual_is_what_the_wires_leave_out() -> None:
    """Powers of two: every sum is exact."""
    n = 300
    v = torch.ldexp(torch.ones(n), torch.randint(-3, 3, (n,)))
    layout = Layout([Segment(codec("tern"), n)])
    residuals = Residuals(layout, [torch.zeros(n)])
    wires = [layout.encode(v, residuals) for _ in range(5)]
    assert torch.equal(layout.decode_sum(wires), 5 * v - residuals.inputs[0])
    assert layout.frames[0].codec == Tern.id


def test_a_code_that_does_not_occur_is_refused() -> None:
    c = codec("tern")
    wire = c.encode(torch.ones(4))
    wire[32 + 16] = 0b10
    with pytest.raises(WireError, match="expected codes 0, 1 and 3, got code 0x2") as caught:
        c.decode(wire, 4, verify=False)
    assert caught.value.segment == 0


def reduced(rank: int, world_size: int) -> Tensor:
    codecs.KNOWN[Tern.name] = Tern
    os.environ["ZCOMM_KERNELS"] = "reference"
    x = torch.full((1000,), float(2**rank))
    zcomm.all_reduce(x, codec="tern", feedback=zcomm.Feedback())
    return x


def test_ranks_reduce_with_it() -> None:
    for got in run_ranks(2, reduced):
        assert torch.equal(got, torch.full((1000,), 1.5))
