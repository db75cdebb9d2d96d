"""The engine gives the bits of the all-reduce that can be read, for every codec."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from ranks import World
from zcomm import Hierarchy
from zcomm.codecs import SPECS, codec
from zcomm.conformance.all_reduce import FlatResiduals, all_reduce, all_reduce_two_hops
from zcomm.sharding.hierarchy import Hosts

NUMEL, STEPS = 300_001, 3  # several pieces for each owner, even of topk on three ranks


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[World]:
    with World(4) as world:
        yield world


def gradient(rank: int, step: int) -> Tensor:
    g = torch.Generator().manual_seed(10 * rank + step)
    x = torch.randn(NUMEL, generator=g)
    if step == 1:
        x[: NUMEL // 3] = 0.0  # these pieces keep their residuals
    return x


def zeros(sent: int = NUMEL, owned: int = NUMEL) -> FlatResiduals:
    return FlatResiduals(torch.zeros(sent), torch.zeros(owned))


def both_in_one_hop(rank: int, world_size: int, spec: str, with_feedback: bool) -> list[bool]:
    feedback = zcomm.Feedback() if with_feedback else None
    residuals = zeros() if with_feedback else None
    same = []
    for step in range(STEPS):
        ours, reference = gradient(rank, step), gradient(rank, step)
        zcomm.all_reduce(ours, spec, feedback=feedback)
        all_reduce(reference, codec(spec), residuals)
        same.append(torch.equal(ours.view(torch.int32), reference.view(torch.int32)))
    return same


def both_in_two_hops(rank: int, world_size: int, spec: str, with_feedback: bool) -> list[bool]:
    return both_over([[0, 1], [2, 3]], rank, spec, with_feedback)


def both_over_unlike_hosts(
    rank: int, world_size: int, spec: str, with_feedback: bool
) -> list[bool]:
    return both_over([[0, 1, 3], [2]], rank, spec, with_feedback)


def both_over(table: list[list[int]], rank: int, spec: str, with_feedback: bool) -> list[bool]:
    every = [Hosts(table, r) for r in range(4)]
    columns = sorted({tuple(sorted(hosts.column)) for hosts in every})
    groups = {ranks: dist.new_group(list(ranks)) for ranks in [*map(tuple, table), *columns]}
    hosts = every[rank]
    mine = groups[hosts.neighbours], groups[tuple(sorted(hosts.column))]
    feedback = zcomm.Feedback() if with_feedback else None
    residuals = zeros() if with_feedback else None
    same = []
    for step in range(STEPS):
        ours, reference = gradient(rank, step), gradient(rank, step)
        zcomm.all_reduce(ours, Hierarchy("int8", spec, hosts=table), feedback=feedback)
        all_reduce_two_hops(reference, codec("int8"), codec(spec), hosts, mine, residuals)
        same.append(torch.equal(ours.view(torch.int32), reference.view(torch.int32)))
    return same


CASES = [(spec, True) for spec in SPECS if spec != "none"]
CASES += [(spec, False) for spec in SPECS if not codec(spec).needs_feedback]


@pytest.mark.parametrize(("spec", "with_feedback"), CASES)
@pytest.mark.parametrize(
    "run",
    [both_in_one_hop, both_in_two_hops, both_over_unlike_hosts],
    ids=["one hop", "two hops", "unlike hosts"],
)
def test_the_engine_gives_the_same_bits(
    four_ranks: World, run: object, spec: str, with_feedback: bool
) -> None:
    assert four_ranks.run(run, spec, with_feedback) == [[True] * STEPS] * 4
