"""Two hops: first the sum within a host, then one encoding between hosts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from everyones import everyones
from raised import Raised, raised
from ranks import World, run_ranks
from zcomm import Hierarchy

pytest_plugins = ["zero_ranks"]
PAIRS, ALONE = [[0, 1], [2, 3]], [[0, 1, 3], [2]]
Table = list[list[int]]
TABLES = pytest.mark.parametrize("hosts", [PAIRS, ALONE], ids=str)


@pytest.fixture(scope="module")
def six() -> Iterator[World]:
    with World(6) as world:
        yield world


def whole_numbers(rank: int, numel: int) -> Tensor:
    """Numbers whose sums are exact in any order."""
    return torch.randint(-99, 100, (numel,), generator=torch.Generator().manual_seed(rank)).float()


# Collectives.

SIZES = (0, 1, 127, 5_000, 300_001)


def exact_sums(rank: int, world_size: int, hosts: Any) -> None:
    hierarchy = Hierarchy(across="none", hosts=hosts)
    for numel in SIZES:
        expected = sum(whole_numbers(r, numel) for r in range(world_size))
        x = whole_numbers(rank, numel)
        zcomm.all_reduce(x, hierarchy, op="sum")
        assert torch.equal(x, expected), numel
        whole = whole_numbers(rank, numel * world_size)
        part = torch.empty(numel)
        zcomm.reduce_scatter(part, whole, hierarchy, op="sum")
        total = sum(whole_numbers(r, numel * world_size) for r in range(world_size))
        assert torch.equal(part, total[rank * numel : (rank + 1) * numel]), numel
        gathered = torch.empty(numel * world_size)
        zcomm.all_gather(gathered, whole_numbers(rank, numel), hierarchy)
        assert torch.equal(
            gathered, torch.cat([whole_numbers(r, numel) for r in range(world_size)])
        ), numel


# Unequal numbers of ranks, too.
OF_FOUR = [2, PAIRS, [[0, 2], [1, 3]], [[0, 3], [2, 1]], 3, [[0, 1, 3], [2]], [[1], [0], [3, 2]]]
OF_SIX = [2, 3, [[0, 5], [4, 1], [3, 2]], [[5, 0, 2], [1, 4, 3]], 4, 5, [[3], [5, 1, 2], [0, 4]]]


@pytest.mark.parametrize("hosts", OF_FOUR, ids=str)
def test_collectives_over_two_hosts_are_exact(quartet: World, hosts: Any) -> None:
    quartet.run(exact_sums, hosts)


@pytest.mark.parametrize("hosts", OF_SIX, ids=str)
def test_collectives_over_six_ranks_are_exact(six: World, hosts: Any) -> None:
    six.run(exact_sums, hosts)


def chunks_of_large_tensors(rank: int, world_size: int, hosts: Table) -> None:
    x = whole_numbers(rank, 5_000_000)
    zcomm.all_reduce(x, Hierarchy(across="none", hosts=hosts), op="sum")
    assert torch.equal(x, sum(whole_numbers(r, 5_000_000) for r in range(world_size)))


@TABLES
def test_many_chunks_are_exact(quartet: World, hosts: Table) -> None:
    quartet.run(chunks_of_large_tensors, hosts)


def of_hosts_and_of_ranks(rank: int, world_size: int, codec: str) -> None:
    """Reducing the hosts' sums in one hop between two ranks gives the same bits."""
    hosts = dist.new_group([0, 2])
    numel, steps = 70_000, 3
    two_hops, one_hop = zcomm.Feedback(), zcomm.Feedback()
    for step in range(steps):
        x = whole_numbers(rank + 10 * step, numel)
        neighbour = whole_numbers((rank ^ 1) + 10 * step, numel)
        host = (x + neighbour) / 2
        zcomm.all_reduce(x, Hierarchy(across=codec, hosts=2), feedback=two_hops)
        if rank in (0, 2):
            zcomm.all_reduce(host, codec, group=hosts, feedback=one_hop)
            assert torch.equal(x, host), step
        assert all(torch.equal(x, other) for other in everyones(x)), step


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4:block=64", "lm4", "lm2", "sign"])
def test_two_hops_are_one_hop_over_the_sums_of_hosts(quartet: World, codec: str) -> None:
    quartet.run(of_hosts_and_of_ranks, codec)


def lossy_local(rank: int, world_size: int) -> list[float]:
    """The relative error of the mean."""
    errors = []
    for local in ("none", "bf16", "int8", "lm4"):
        x = torch.randn(50_000, generator=torch.Generator().manual_seed(rank))
        mean = torch.stack(everyones(x)).mean(0)
        zcomm.all_reduce(x, Hierarchy(local, "int8", hosts=2))
        assert all(torch.equal(x, other) for other in everyones(x))
        errors.append(((x - mean).norm() / mean.norm()).item())
    return errors


def test_codec_inside_of_a_host_is_used(quartet: World) -> None:
    for none, bf16, int8, lm4 in quartet.run(lossy_local):
        assert 0 < none < bf16 < int8 < 0.02 < lm4 < 0.2


def dtypes(rank: int, world_size: int, hosts: Table) -> None:
    hierarchy = Hierarchy(across="none", hosts=hosts)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        x = (whole_numbers(rank, 3_000) / 4).to(dtype)
        total = sum(one.double() for one in everyones(x)).to(dtype)
        zcomm.all_reduce(x, hierarchy, op="sum")
        assert torch.equal(x, total), dtype


@TABLES
def test_all_dtypes_are_summed(quartet: World, hosts: Table) -> None:
    quartet.run(dtypes, hosts)


def mixed_kinds(rank: int, world_size: int, hosts: Table) -> None:
    """Concurrent collectives with one and with two hops, finishing in every order."""
    hierarchy = Hierarchy(across="none", hosts=hosts)
    for step in range(12):
        large = torch.full((400_000,), float(rank + step))
        small, everyone = torch.full((100,), float(rank)), torch.empty(400)
        flat = torch.full((1000,), float(rank))
        first = zcomm.all_reduce(large, hierarchy, async_op=True, op="sum")
        second = zcomm.all_gather(everyone, small, hierarchy, async_op=True)
        third = zcomm.all_reduce(flat, "none", async_op=True, op="sum")
        for work in (third, second, first):
            assert work is not None
            work.wait()
        assert (large == 6 + 4 * step).all()
        assert (flat == 6).all()
        assert torch.equal(everyone.view(4, -1)[:, 0], torch.arange(4.0))


@TABLES
def test_collectives_of_all_kinds_at_once(quartet: World, hosts: Table) -> None:
    quartet.run(mixed_kinds, hosts)


def refusals(rank: int, world_size: int) -> list[tuple[str, str]]:
    """The type and text of the errors for hosts that do not fit."""
    ways = (
        Hierarchy(hosts=[[0, 1], [2]]),
        Hierarchy(across={"*": "lm4"}, hosts=2),
    )
    errors = [raised(zcomm.all_reduce, torch.ones(5), way) for way in ways]
    return [(error.type, error.text) for error in errors]


def test_hosts_that_do_not_fit_are_refused_on_every_rank(quartet: World) -> None:
    for rank, (short, patterns) in enumerate(quartet.run(refusals)):
        assert short[0] == "ValueError"
        assert f"rank {rank}: Hierarchy: expected hosts that list every rank" in short[1]
        assert "without the group's rank 3" in short[1]
        assert patterns[0] == "TypeError"
        assert "expected one codec across hosts" in patterns[1]


def call_differently(rank: int, world_size: int) -> Raised:
    zcomm.all_reduce(torch.ones(5), "lm4")
    return raised(zcomm.all_reduce, torch.ones(5), Hierarchy(hosts=2) if rank else "lm4")


def test_one_and_two_hops_at_once_are_refused() -> None:
    for rank, error in enumerate(run_ranks(4, call_differently)):
        assert error.is_value_error
        assert f"rank {rank}: expected the same call on all ranks" in error.text
        assert "rank 1: all_reduce with hosts=2" in error.text
        assert error.seconds < 10


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"local": "topk:0.01"}, ValueError, "expected a local codec that works without feedback"),
        ({"local": "int9"}, ValueError, "expected one of none, bf16"),
        ({"hosts": 0}, ValueError, "expected hosts >= 1, got 0"),
        ({"hosts": 1.5}, TypeError, "expected hosts as an int, got 1.5; or lists of ranks"),
        ({"hosts": [0, 1]}, TypeError, "expected a list of ranks for each host"),
        ({"hosts": [[0, 1], [1, 2]]}, ValueError, "expected each rank on one host, got rank 1"),
        ({"across": Hierarchy()}, TypeError, "got a Hierarchy"),
    ],
)
def test_bad_hierarchies_are_refused(
    options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Hierarchy(**options)


def one_hop(rank: int, world_size: int) -> None:
    for hosts in (1, 4):
        x = torch.randn(10_000, generator=torch.Generator().manual_seed(rank))
        y = x.clone()
        zcomm.all_reduce(x, Hierarchy(across="lm4", hosts=hosts))
        zcomm.all_reduce(y, "lm4")
        assert torch.equal(x, y), hosts


def test_one_host_or_one_rank_on_each_is_one_hop(quartet: World) -> None:
    quartet.run(one_hop)
