"""topk sends exactly the elements that a stable sort by magnitude puts first."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from contract_data import assert_same
from kernel_sets import CONTRACT_SETS
from zcomm import codec
from zcomm.codecs.topk import RANGE

# Three full ranges of 65,536 elements and a short one.
LARGE = 3 * RANGE + 777


def _normal(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


def _only_at(n: int, step: int) -> Tensor:
    return torch.where(torch.arange(n) % step == step // 2, _normal(n), 0.0)


def _clustered(n: int) -> Tensor:
    """All large values are in the last tenth; the rest are much smaller."""
    return torch.where(torch.arange(n) >= n - n // 10 - 1, _normal(n) + 100, _normal(n) * 1e-3)


# A selection by threshold may mishandle data that its sample barely sees.
DATA = {
    "normal": _normal,
    "zeros": lambda n: _normal(n) * 0.0,
    "constant": lambda n: torch.full((n,), -2.5),
    "two magnitudes": lambda n: torch.where(_normal(n) > 2, 1.0, -0.5),
    "heavy ties": lambda n: torch.round(_normal(n)) / 4,
    "ties at the threshold": lambda n: _normal(n).abs().clamp(1.0, 2.0) * torch.sign(_normal(n)),
    "clustered at the end": _clustered,
    "clustered at the start": lambda n: _clustered(n).flip(0),
    "fewer nonzeros than k": lambda n: _only_at(n, 999),
    "as many nonzeros as k at most": lambda n: _only_at(n, 101),
    "periodic": lambda n: torch.where(torch.arange(n) % 128 == 5, 3.0, _normal(n)),
    "one nonzero": lambda n: torch.where(torch.arange(n) == n // 2, -1e-45, 0.0),
    "rising": lambda n: torch.arange(n).float() + 1,
    "falling": lambda n: n - torch.arange(n).float(),
    "subnormal": lambda n: _normal(n) * 1e-40,
    "largest": lambda n: torch.where(_normal(n) > 1, torch.finfo(torch.float32).max, _normal(n)),
}


@cache
def data(kind: str, n: int) -> Tensor:
    return DATA[kind](n)


@cache
def order(kind: str, n: int) -> Tensor:
    """All indices, sorted by magnitude, then by index."""
    magnitude = data(kind, n).view(torch.int32) & 0x7FFFFFFF
    return torch.sort(magnitude, descending=True, stable=True).indices


def sent(wire: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """The indices and values in a wire, parsed by the format's table."""
    ranges, body = -(-n // RANGE), wire[32:]
    counts = body[: 4 * ranges].view(torch.int32)
    at = -(-4 * ranges // 16) * 16
    offsets = body[at : at + 2 * k].view(torch.int16).to(torch.int64) & 0xFFFF
    starts = torch.repeat_interleave(torch.arange(ranges) * RANGE, counts)
    at += -(-2 * k // 16) * 16
    return starts + offsets, body[at : at + 2 * k].view(torch.bfloat16)


@pytest.mark.parametrize("kernels", CONTRACT_SETS)
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("ratio", ["0.01", "0.3", "1", "0.000001"])
def test_selection_is_that_of_a_stable_sort(ratio: str, kind: str, kernels: str) -> None:
    c = codec(f"topk:{ratio}")
    for n in (1, 5, 511, 513, 2049, 5003, RANGE + 1, LARGE):
        x, k = data(kind, n), c.k(n)
        residual = torch.zeros(n)
        wire = c.encode(x, residual, kernels=kernels)
        index, values = sent(wire, n, k)
        expected = order(kind, n)[:k].sort().values
        assert torch.equal(index, expected), f"n {n}"
        largest = torch.finfo(torch.bfloat16).max
        v = x + 0.0
        rounded = v[index].clamp(-largest, largest).to(torch.bfloat16)
        assert_same(values, rounded + 0.0, f"n {n}")  # -0 is sent as +0
        decoded = torch.zeros(n)
        decoded[index] = values.float()
        assert_same(residual, v - decoded, f"residual, n {n}")
        assert_same(c.decode(wire, n, kernels=kernels), decoded, f"decoded, n {n}")


@pytest.mark.parametrize("kernels", CONTRACT_SETS)
def test_negative_zero_that_one_wire_sends_and_another_does_not(kernels: str) -> None:
    """-0 is sent as +0: a sum does not depend on which wire sent a zero."""
    c = codec("topk:0.5")
    first = c.encode(torch.tensor([-0.0, 0.0]), kernels=kernels)
    second = c.encode(torch.tensor([0.0, 1.0]), kernels=kernels)
    for wires, expected in (
        ([first], [0.0, 0.0]),
        ([first, second], [0.0, 1.0]),
        ([second, first], [0.0, 1.0]),
        ([first, first], [0.0, 0.0]),
        ([first, first, second], [0.0, 1.0]),
    ):
        total = c.decode_sum(wires, 2, kernels=kernels)
        assert_same(total, torch.tensor(expected), f"{len(wires)} wires")
