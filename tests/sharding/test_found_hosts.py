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
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ranks import World, run_ranks
from zcomm import Hierarchy
from zcomm.base.host import Host, labels, this_host
from zcomm.base.launcher import contradiction
from zcomm.launch import hosts
from zcomm.launch import ranks as own_ranks
from zcomm.sharding.hierarchy import announced, met_hosts

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


class Found(NamedTuple):
    table: str
    sent: dict[str, float]  # bytes that leave a host per rank
    of_three: list[float]
    warned: list[str]


def over_two_networks(rank: int, world_size: int) -> Found:
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, announced())
    table = repr(met_hosts(Hierarchy(), everyone, None, rank))
    ways = {
        "one hop": Hierarchy(hosts=1),
        "found": Hierarchy(),
        "by itself": "lm4",
        "in blocks": Hierarchy(hosts=2),
    }
    three = dist.new_group([0, 1, 2])
    with caught() as warned:
        sent = {name: sent_bytes(codec) for name, codec in ways.items()}
        x = torch.full((70_000,), float(rank))
        if rank < 3:  # two on one host, and one on the other
            zcomm.all_reduce(x, "none", group=three)
    return Found(table, sent, x[::1000].tolist(), warned)


def sent_bytes(codec: Any) -> float:
    x = torch.randn(1_000_000)
    zcomm.all_reduce(x, codec)  # makes the engine
    dist.barrier()
    before = hosts.sent_bytes()
    zcomm.all_reduce(x, codec)
    dist.barrier()
    return hosts.sent_bytes() - before


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_ranks_numbered_round_robin_send_as_little_as_those_in_blocks() -> None:
    env = {"GLOO_SOCKET_IFNAME": hosts.INTERFACE, "LOCAL_WORLD_SIZE": "2"}
    with hosts.network(2, "1gbit") as prefixes:
        of_ranks = [prefixes[rank % 2] for rank in range(4)]
        with own_ranks.World(4, env=env, prefixes=of_ranks) as world:
            every = world.run(over_two_networks)
    for rank, found in enumerate(every):
        assert found.table == "[[0, 2], [1, 3]]"
        # As in blocks: test_half_of_the_bytes_cross_between_two_hosts_of_two_ranks.
        assert 0.45 < found.sent["found"] / found.sent["one hop"] < 0.55
        assert 0.45 < found.sent["by itself"] / found.sent["one hop"] < 0.55
        assert found.sent["in blocks"] > 2.5 * found.sent["found"]
        assert not found.warned
        assert found.of_three == [1.0 if rank < 3 else 3.0] * 70


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
