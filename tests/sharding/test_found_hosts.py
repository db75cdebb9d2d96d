"""Hierarchy() goes by the hosts on which ranks find themselves, however a launcher numbers them."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import zcomm
from crossing_bytes import collective, sent
from ddp_training import assert_bit_equal
from ranks import World, run_ranks
from zcomm import Hierarchy
from zcomm.base.host import Host, labels, this_host
from zcomm.base.launcher import contradiction
from zcomm.launch import hosts
from zcomm.launch import ranks as own_ranks
from zcomm.sharding.hierarchy import announced, met_hosts
from zero_training import parameters, train, wrapped

pytest_plugins = ["zero_ranks"]
A, B = Host("a", "b00t", "1"), Host("b", "b00t", "2")
NAME = socket.gethostname()


@contextmanager
def caught() -> Iterator[list[str]]:
    """The texts of zcomm's warnings."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield texts
    texts += [str(one.message) for one in found if "zcomm" in str(one.message)]


# Two network namespaces, with ranks numbered as by `mpirun --map-by node`.


@pytest.fixture(scope="module")
def in_turns() -> Iterator[World]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    env = {"GLOO_SOCKET_IFNAME": hosts.INTERFACE, "LOCAL_WORLD_SIZE": "2"}
    with hosts.network(2, "1gbit") as prefixes:
        of_ranks = [prefixes[rank % 2] for rank in range(4)]
        with own_ranks.World(4, env=env, prefixes=of_ranks) as world:
            yield world


class Found(NamedTuple):
    table: str
    sent: dict[str, float]  # bytes that leave this rank's host
    of_three: list[float]
    warned: list[str]


def over_two_networks(rank: int, world_size: int) -> Found:
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, announced())
    table = repr(met_hosts(Hierarchy(), everyone, None, rank))
    ways = {
        "one hop": Hierarchy(across="lm4", hosts=1),
        "found": Hierarchy(across="lm4"),
        "by itself": "lm4",
        "in blocks": Hierarchy(across="lm4", hosts=2),
    }
    three = dist.new_group([0, 1, 2])
    with caught() as warned:
        found = {name: sent(collective(codec), 2) for name, codec in ways.items()}
        x = torch.full((70_000,), float(rank))
        if rank < 3:  # two on one host, and one on the other
            zcomm.all_reduce(x, "none", group=three)
    return Found(table, found, x[::1000].tolist(), warned)


def test_ranks_numbered_round_robin_send_as_little_as_those_in_blocks(in_turns: World) -> None:
    for rank, found in enumerate(in_turns.run(over_two_networks)):
        assert found.table == "[[0, 2], [1, 3]]"
        # As in blocks: test_half_of_the_bytes_cross_between_two_hosts_of_two_ranks.
        assert 0.45 < found.sent["found"] / found.sent["one hop"] < 0.55
        assert 0.45 < found.sent["by itself"] / found.sent["one hop"] < 0.55
        assert found.sent["in blocks"] > 2.5 * found.sent["found"]
        assert not found.warned
        assert found.of_three == [1.0 if rank < 3 else 3.0] * 70


IN_TURNS = [[0, 2], [1, 3]]


class Trained(NamedTuple):
    parameters: Any
    transport: str


def hooked(rank: int, codec: Any) -> Trained:
    ddp = wrapped()
    handle = zcomm.compress(ddp, codec, feedback=True, min_numel=0)
    train(ddp, optim.SGD(ddp.parameters(), lr=0.1), rank)
    return Trained(parameters(ddp), handle.transport)


def stepped(rank: int, codec: Any) -> Trained:
    ddp = wrapped()
    settings: dict[str, Any] = {"codec": codec, "param_codec": "int8", "feedback": True}
    opt = zcomm.ZeroOptimizer(ddp, optim.SGD, **settings, lr=0.1)
    train(ddp, opt, rank)
    return Trained(parameters(ddp), opt.handle.transport)


def trained(rank: int, world_size: int) -> list[Trained]:
    """The hook and ZeRO, each with a codec alone and with the Hierarchy that it stands for."""
    codecs = "int4", Hierarchy("none", "int4", hosts=IN_TURNS)
    return [step(rank, codec) for step in (hooked, stepped) for codec in codecs]


def test_hook_and_zero_keep_replicas_equal_on_ranks_numbered_round_robin(in_turns: World) -> None:
    ranks = in_turns.run(trained)
    for ways in ranks:
        for way, first in zip(ways, ranks[0]):
            assert_bit_equal(way.parameters, first.parameters)
            assert way.transport == "shared memory inside hosts, gloo between them"
        for alone, given in (ways[:2], ways[2:]):
            assert_bit_equal(alone.parameters, given.parameters)


def without_memory(rank: int, world_size: int, host: int | None) -> tuple[list[Any], list[Trained]]:
    """Sums and trainings of all kinds, while ranks of a host share no memory."""
    env = {"ZCOMM_SHM": "0"} if host is not None and rank in IN_TURNS[host] else {}
    with mock.patch.dict(os.environ, env):
        group, sums = dist.new_group(range(world_size)), []
        for codec in ("none", "bf16", "lm4", "int8:block=64", "topk:0.9"):
            feedback = zcomm.Feedback()
            for _ in range(2):
                x = torch.randn(3_000_000, generator=torch.Generator().manual_seed(rank))
                zcomm.all_reduce(x, codec, group, feedback=feedback)
            sums.append(x)
        return sums, [hooked(rank, "int4"), stepped(rank, "int4")]


def test_a_host_without_shared_memory_gives_the_bits_of_one_with_it(in_turns: World) -> None:
    everywhere = in_turns.run(without_memory, None)
    for rank, (sums, ways) in enumerate(in_turns.run(without_memory, 1)):
        expected_sums, expected = everywhere[rank]
        where = f"gloo: rank {IN_TURNS[1][0]}: ZCOMM_SHM=0" if rank in IN_TURNS[1] else "shared mem"
        assert all(torch.equal(x, y) for x, y in zip(sums, expected_sums))
        for way, other in zip(ways, expected):
            assert_bit_equal(way.parameters, other.parameters)
            assert way.transport.startswith(where)
            assert other.transport == "shared memory inside hosts, gloo between them"


# What launchers say.


def reduce_once(rank: int, world_size: int, env: Mapping[str, str]) -> list[str]:
    """zcomm's warnings, from two models' worth of groups."""
    given = {name: value.split()[rank] for name, value in env.items()}
    with mock.patch.dict(os.environ, given), caught() as warned:
        for _ in range(2):
            group = dist.new_group(range(world_size))
            x = torch.full((5,), float(rank))
            zcomm.all_reduce(x, Hierarchy(across="none"), group=group)
            assert (x == (world_size - 1) / 2).all()
    return warned


def test_a_launcher_that_says_otherwise_draws_one_warning(quartet: World) -> None:
    assert quartet.run(reduce_once, {}) == [[], [], [], []]
    first, *others = quartet.run(reduce_once, {"GROUP_RANK": "0 0 1 1"})
    assert first == [
        f"zcomm: GROUP_RANK puts ranks 0 and 2 on different hosts, but both are on {NAME}. The "
        f"hierarchy goes by the hosts that were found: {NAME}. To use others, pass "
        "Hierarchy(hosts=[[0, 1], [2, 3]])"
    ]
    assert others == [[], [], []]


def compress_alone(rank: int, world_size: int) -> tuple[list[str], float]:
    assert "LOCAL_WORLD_SIZE" not in os.environ
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with caught() as warned:
        zcomm.compress(ddp, Hierarchy())
    ddp(torch.ones(1, 1)).backward()
    return warned, ddp.module.weight.grad.item()


def test_one_process_needs_no_variables() -> None:
    assert run_ranks(1, compress_alone) == [([], 1.0)]


@pytest.mark.parametrize(
    ("variables", "where", "says"),
    [
        ({"GROUP_RANK": "0011"}, [A, B, A, B], "GROUP_RANK puts ranks 0 and 1 on one host, but"),
        ({"GROUP_RANK": "0011"}, [A, B, A, B], "but they are on a and b"),
        ({"NODE_RANK": "0101"}, [A, A, B, B], "NODE_RANK puts ranks 0 and 1 on different hosts"),
        ({"SLURM_NODEID": "0000"}, [A, A, B, B], "SLURM_NODEID puts ranks 0 and 2 on one host"),
        ({"LOCAL_WORLD_SIZE": "4444"}, [A, B, A, B], "is 4 on rank 0, but its host a has 2 ranks"),
        ({"GROUP_RANK": "1010", "LOCAL_WORLD_SIZE": "2222"}, [A, B, A, B], ""),
        ({"GROUP_RANK": "00--"}, [A, B, A, B], ""),  # some ranks do not have it
    ],
)
def test_a_contradiction_names_ranks_and_hosts(
    variables: dict[str, str], where: list[Host], says: str
) -> None:
    said = [{n: v[rank] for n, v in variables.items() if v[rank] != "-"} for rank in range(4)]
    found = contradiction(said, where, whole=True)
    assert says in found
    assert bool(says) == bool(found)


def test_a_part_of_the_job_is_not_counted() -> None:
    said = [{"LOCAL_WORLD_SIZE": "2"}] * 2
    assert contradiction(said, [A, B], whole=True)
    assert not contradiction(said, [A, B], whole=False)


# What a host is.


def test_a_host_is_a_name_a_boot_and_a_network() -> None:
    here = this_host()
    assert here.name == NAME
    assert len(here.boot) == 36
    assert here.network.isdigit()
    assert Host.loads(here.dumps()) == here
    assert len({A, A._replace(boot="x"), A._replace(network="9"), A._replace(name="z")}) == 4


def test_namesakes_are_told_apart() -> None:
    other = A._replace(network="2")
    assert labels([A, B]) == {A: "a", B: "b"}
    assert labels([A, other]) == {A: "a (boot b00t, network 1)", other: "a (boot b00t, network 2)"}
