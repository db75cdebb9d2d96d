"""Hosts behind links, three ranks on one and one on the other: what crosses, and who counts as one.

A host is a network namespace: all have one name and one boot id, but networks of their own.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import optim

import zcomm
from crossing_bytes import STEPS, collective, sent
from ddp_training import assert_bit_equal, batch
from fsdp_training import Outcome, compress, mesh_of, sharded
from fsdp_training import train as train_sharded
from zcomm import Hierarchy, collectives
from zcomm.base.host import Host, labels, this_host
from zcomm.launch import hosts
from zcomm.launch.ranks import World
from zero_training import parameters, train, wrapped

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
HOSTS, RATE = (3, 1), "1gbit"
TABLE = [[0, 1, 2], [3]]


@pytest.fixture(scope="module")
def three_and_one() -> Iterator[World]:
    with hosts.world(4, HOSTS, RATE) as world:
        yield world


# What crosses the link.


def bytes_of_ways(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    """The bytes that leave this rank's host in a step."""
    one_on_each = dist.new_group([0, 3])
    here = HOSTS[0] if rank < 3 else HOSTS[1]
    ways = {"by itself": "lm4", "one hop": Hierarchy(across="lm4", hosts=1)}
    found = {
        name: {way: sent(make(codec), here) for way, codec in ways.items()}
        for name, make in STEPS.items()
    }
    alone = collective("lm4", one_on_each) if rank in (0, 3) else lambda: None
    found["all_reduce"]["one rank on each"] = sent(alone, here)
    return found


def test_a_codec_alone_sends_over_the_link_what_one_rank_on_each_host_would(
    three_and_one: World,
) -> None:
    ranks = three_and_one.run(bytes_of_ways)
    of_three, of_one = ranks[0], ranks[3]
    for found in (of_three, of_one):
        sums = found["all_reduce"]
        assert 0.95 < sums["by itself"] / sums["one rank on each"] < 1.05
    # With one hop a quarter goes to or from each of three ranks, there and back. With two hops the
    # quarter of the one rank crosses once.
    for name in STEPS:
        one, two = (of_three[name][k] + of_one[name][k] for k in ("one hop", "by itself"))
        assert 0.64 < two / one < 0.69, name


# Results.


def whole_numbers(rank: int, numel: int) -> torch.Tensor:
    """Numbers whose sums are exact in any order."""
    return torch.randint(-99, 100, (numel,), generator=torch.Generator().manual_seed(rank)).float()


def exact_sums(rank: int, world_size: int) -> None:
    for numel in (1, 5_000, 300_001, 3_000_000):
        x = whole_numbers(rank, numel)
        zcomm.all_reduce(x, "none", op="sum")
        assert torch.equal(x, sum(whole_numbers(r, numel) for r in range(world_size))), numel


def test_sums_without_a_codec_are_exact(three_and_one: World) -> None:
    three_and_one.run(exact_sums)


class Trained(NamedTuple):
    losses: list[float]  # of one batch, before and after
    parameters: dict[str, torch.Tensor]
    transport: str


def trained(codec: Any, rank: int, with_zero: bool) -> Trained:
    ddp = wrapped()
    settings: dict[str, Any] = {"codec": codec, "feedback": True, "min_numel": 0}
    if with_zero:
        opt: Any = zcomm.ZeroOptimizer(ddp, optim.AdamW, lr=1e-3, **settings)
        handle = opt.handle
    else:
        handle, opt = zcomm.compress(ddp, **settings), optim.AdamW(ddp.parameters(), lr=1e-3)
    losses = [loss(ddp.module)]
    train(ddp, opt, rank, steps=12)
    return Trained([*losses, loss(ddp.module)], parameters(ddp), handle.transport)


@torch.no_grad()
def loss(model: Any) -> float:
    return model(batch(0, 0)).square().mean().item()


def hooked_and_sharded(rank: int, world_size: int) -> list[list[Trained]]:
    """The hook and ZeRO, each with a codec alone and with the Hierarchy that it stands for."""
    codecs = "int4", Hierarchy("none", "int4", hosts=TABLE)
    return [[trained(codec, rank, zero) for codec in codecs] for zero in (False, True)]


def test_hook_and_zero_train_and_replicas_stay_equal(three_and_one: World) -> None:
    ranks = three_and_one.run(hooked_and_sharded)
    for rank, ways in enumerate(ranks):
        for (alone, given), (first, _) in zip(ways, ranks[0]):
            assert alone.losses[1] < alone.losses[0] / 2
            assert_bit_equal(alone.parameters, first.parameters)
            assert_bit_equal(alone.parameters, given.parameters)
            assert alone.transport == given.transport == transport_of(rank)


def transport_of(rank: int) -> str:
    if rank == 3:
        return "gloo: rank 3: no other rank of the group is on its host"
    return "shared memory inside hosts, gloo between them"


def fully_sharded(rank: int, world_size: int) -> list[tuple[Outcome, str]]:
    """FSDP2 with a codec alone and with the Hierarchy that it stands for."""
    found = []
    for codec in ("int4", Hierarchy("none", "int4", hosts=TABLE)):
        model = sharded(mesh_of(world_size))
        handle = compress(model, codec=codec, param_codec="int8", feedback=True)
        found.append((train_sharded(model, rank), handle.transport))
        handle.close()
    return found


def test_fsdp2_takes_two_hops_by_itself(three_and_one: World) -> None:
    ranks = three_and_one.run(fully_sharded)
    for rank, ((alone, transport), (given, _)) in enumerate(ranks):
        assert transport == transport_of(rank)
        assert alone.losses == given.losses
        assert_bit_equal(alone.parameters, given.parameters)
        assert_bit_equal(alone.parameters, ranks[0][0][0].parameters)


# Who shares a host.


class Seen(NamedTuple):
    host: Host
    launched: str  # LOCAL_WORLD_SIZE
    tables: list[str]
    warned: list[str]


def meet_twice(rank: int, world_size: int, env: dict[str, str]) -> Seen:
    """The hosts of two groups' engines, and zcomm's warnings."""
    launched, tables = os.environ["LOCAL_WORLD_SIZE"], []
    with mock.patch.dict(os.environ, env), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            group = dist.new_group(range(world_size))
            x = torch.full((5,), float(rank))
            zcomm.all_reduce(x, "none", group)
            assert (x == 1.5).all()
            tables += [repr(made.hosts) for (of, *_), made in engines() if of is group]
    warned = [str(one.message) for one in found if "zcomm" in str(one.message)]
    return Seen(this_host(), launched, tables, warned)


def engines() -> Any:
    return list(collectives._engines.items())


def test_the_launcher_tells_each_rank_how_many_its_host_has(three_and_one: World) -> None:
    seen = three_and_one.run(meet_twice, {})
    assert [one.launched for one in seen] == ["3", "3", "3", "1"]
    assert not any(one.warned for one in seen)


def test_namesakes_of_one_boot_with_networks_of_their_own_are_hosts(three_and_one: World) -> None:
    """Such as containers on one machine."""
    seen = three_and_one.run(meet_twice, {})
    first, *_, last = found = [one.host for one in seen]
    assert found == [first, first, first, last]
    assert (first.name, first.boot) == (last.name, last.boot)
    assert first.network != last.network
    assert len(set(labels(found).values())) == 2
    for one in seen:
        assert one.tables == ["[[0, 1, 2], [3]]"] * 2


def test_a_launcher_that_lies_draws_one_warning_and_the_hosts_found_are_used(
    three_and_one: World,
) -> None:
    first, *others = three_and_one.run(meet_twice, {"LOCAL_WORLD_SIZE": "4"})
    (warned,) = first.warned
    assert f"zcomm: LOCAL_WORLD_SIZE is 4 on rank 0, but its host {first.host.name} (b" in warned
    assert "has 3 ranks. The hierarchy goes by the hosts that were found:" in warned
    assert not any(one.warned for one in others)
    for one in (first, *others):
        assert one.tables == ["[[0, 1, 2], [3]]"] * 2
