"""Two hops in training: the hook, ZeRO, checkpoints and failures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim
from torch.nn.parallel import DistributedDataParallel

import zcomm
from crossing_bytes import STEPS, sent
from ddp_training import (
    ROUNDING,
    Net,
    assert_bit_equal,
    assert_equal_replicas,
    largest,
    residuals,
    seeded,
    train,
)
from everyones import everyones
from failing_training import TIMEOUT_S, DamagingChannel, backward, model
from raised import Raised, raised
from ranks import OVER_GLOO, World, run_ranks
from zcomm import Hierarchy
from zcomm.launch import hosts
from zcomm.sharding.hierarchy import Hosts
from zero_training import difference, plain, trained, zero

pytest_plugins = ["zero_ranks"]
PAIRS, ALONE, THREE_HOSTS = [[0, 1], [2, 3]], [[0, 1, 3], [2]], [[1], [0], [3, 2]]
Table = list[list[int]]


# The hook.


def hooked(rank: int, world_size: int, settings: dict[str, Any]) -> Any:
    ddp = DistributedDataParallel(seeded(Net), bucket_cap_mb=0.05)
    handle = zcomm.compress(ddp, **settings)
    result = train(ddp, rank, handle)
    sizes = handle.residual_nbytes()
    handle.close()
    return result, sizes


@pytest.mark.parametrize("table", [PAIRS, ALONE], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_hook_loses_nothing_and_replicas_are_equal(
    quartet: World, dtype: str, table: Table
) -> None:
    settings = {"feedback": True, "residual_dtype": dtype, "min_numel": 0, "chunk_mb": 1 / 16}
    one = quartet.run(hooked, {"codec": "int4", **settings})
    two = quartet.run(hooked, {"codec": Hierarchy(across="int4", hosts=table), **settings})
    for found in (one, two):
        assert_equal_replicas([outcome for outcome, _ in found])
        bound = {"fp32": 1e-6, "bf16": 2e-3, "int8": 2e-3}[dtype]
        assert max(outcome.gap for outcome, _ in found) < bound
    # Residuals of what goes to the owners that a rank is deputy for, and of its owned part.
    for rank, ((_, flat), (_, held)) in enumerate(zip(one, two)):
        owners = len(Hosts(table, rank).owners)
        assert held / flat == pytest.approx((owners / 4 + 1 / 4) / (1 + 1 / 4), rel=0.02)


@pytest.mark.parametrize("table", [PAIRS, ALONE, THREE_HOSTS], ids=str)
def test_hook_without_codecs_is_plain_ddp_to_rounding(quartet: World, table: Table) -> None:
    plain_ddp = quartet.run(hooked, {"codec": "none"})
    two_hops = quartet.run(hooked, {"codec": Hierarchy(across="none", hosts=table)})
    for (expected, _), (got, _) in zip(plain_ddp, two_hops):
        assert 0.0 < difference(expected.parameters, got.parameters) < 1e-6


def state_over_other_hosts(rank: int, world_size: int, before: Any, after: Any) -> Any:
    """The residuals of all ranks, summed, of a saved state and where it was loaded."""
    handles = []
    for table in (before, after):
        ddp = wrapped()
        settings: dict[str, Any] = {"feedback": True, "min_numel": 0}
        handles.append(zcomm.compress(ddp, Hierarchy(across="int4", hosts=table), **settings))
        train(ddp, rank)  # on the second one, unrelated: it must leave no trace
    handles[1].load_state_dict(handles[0].state_dict())
    mine = [residuals(handle) for handle in handles]
    sums = []
    for ranks in zip(*everyones(mine)):
        sent = {n: sum(one["sent"][n].double() for one in ranks) for n in ranks[0]["sent"]}
        owned = {n: torch.cat([one["owned"][n] for one in ranks]) for n in ranks[0]["owned"]}
        sums.append((sent, owned))
    same = all(torch.equal(mine[0]["sent"][n], t) for n, t in mine[1]["sent"].items())
    for handle in handles:
        handle.close()
    return sums, same


GROUPINGS = [(PAIRS, PAIRS), (PAIRS, [[0, 2], [1, 3]]), (1, ALONE), (ALONE, PAIRS), (ALONE, 1)]


@pytest.mark.parametrize(("before", "after"), GROUPINGS, ids=str)
def test_hook_state_keeps_the_sum_of_residuals_on_other_hosts(
    quartet: World, before: Any, after: Any
) -> None:
    for (saved, loaded), same in quartet.run(state_over_other_hosts, before, after):
        assert same == (before == after)
        assert_bit_equal(loaded[1], saved[1])
        for name, expected in saved[0].items():
            assert largest(expected) > 0
            assert largest(loaded[0][name] - expected) <= ROUNDING * largest(expected), name


def wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(seeded(Net))


# ZeRO.


def sharded(
    rank: int, world_size: int, table: Table, options: dict[str, Any]
) -> tuple[float, float]:
    """How far ZeRO with two hops is from plain DDP, and ranks are from each other."""
    expected = trained(plain(optim.AdamW, lr=1e-2), rank)
    make = zero(optim.AdamW, Hierarchy(across="none", hosts=table), lr=1e-2, **options)
    got = trained(make, rank)
    same = all(difference(got, other) == 0.0 for other in everyones(got))
    return difference(expected, got), float(not same)


@pytest.mark.parametrize("table", [PAIRS, ALONE, THREE_HOSTS], ids=str)
def test_zero_over_two_hops_is_plain_adamw_to_rounding(quartet: World, table: Table) -> None:
    for far, apart in quartet.run(sharded, table, {}):
        assert far < 1e-5
        assert apart == 0.0


@pytest.mark.parametrize("table", [PAIRS, ALONE, THREE_HOSTS], ids=str)
def test_zero_with_coded_parameters_keeps_replicas_equal(quartet: World, table: Table) -> None:
    for far, apart in quartet.run(sharded, table, {"param_codec": "int8", "min_numel": 0}):
        assert far < 1e-2
        assert apart == 0.0


def refused_parameters(rank: int, world_size: int) -> Raised:
    return raised(zcomm.ZeroOptimizer, wrapped(), optim.SGD, param_codec=Hierarchy())


def test_hierarchy_of_parameters_is_refused(quartet: World) -> None:
    for error in quartet.run(refused_parameters):
        assert error.type == "TypeError"
        assert "give that as codec=" in error.text


def saved_and_loaded(rank: int, world_size: int, folder: str, ways: tuple[Any, Any]) -> float:
    """The largest change in the sum of all ranks' residuals between the two ways."""
    sums = []
    for step, table in enumerate(ways):
        codec = "int4" if table is None else Hierarchy(across="int4", hosts=table)
        ddp = wrapped()
        opt = zcomm.ZeroOptimizer(ddp, optim.SGD, codec=codec, feedback=True, min_numel=0, lr=0.1)
        if step:
            zcomm.load_checkpoint(folder, {"optimizer": opt})
        else:
            for i in range(3):
                opt.zero_grad()
                ddp(
                    torch.randn(8, 32, generator=torch.Generator().manual_seed(9 * i + rank))
                ).sum().backward()
                opt.step()
            zcomm.save_checkpoint(folder, {"optimizer": opt}, 3)
        feedback = opt.compressor.feedback
        held = {n: s.spread(feedback.side) for n, s in feedback.held("sent").items()}
        sums.append({n: sum(one[n].double() for one in everyones(held)) for n in held})
        opt.close()
    assert max(t.abs().max() for t in sums[0].values()) > 1e-3
    return max((sums[0][n] - sums[1][n]).abs().max().item() for n in sums[0])


WAYS = [
    (2, None),
    (None, 2),
    (2, 2),
    (2, [[0, 3], [1, 2]]),
    (ALONE, None),
    (None, ALONE),
    (2, ALONE),
    (ALONE, [[0], [1, 2, 3]]),
    (THREE_HOSTS, ALONE),
]


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_residuals_are_conserved_from_hosts_to_hosts(
    quartet: World, tmp_path: Path, ways: tuple[Any, Any]
) -> None:
    assert max(quartet.run(saved_and_loaded, str(tmp_path), ways)) < 1e-6


# Failures.


@pytest.fixture(scope="module")
def over_gloo() -> Iterator[World]:
    with World(4, env=OVER_GLOO) as world:
        yield world


def train_with_damage(
    rank: int, world_size: int, table: Table, victim: int, pair: str, way: str
) -> list[Raised]:
    ddp = model()
    handle = zcomm.compress(ddp, Hierarchy("int8", "int8", hosts=table))
    backward(ddp)
    if rank == victim:
        channel = getattr(getattr(handle._compressor.engine.transport, pair), way)
        channel.__class__ = DamagingChannel
    return [raised(backward, ddp), raised(backward, ddp)]


# The rank that gets damaged bytes, where; the hop in which it finds them, and their sender.
HOPS = [
    (PAIRS, 1, "local", "reduce", "reduce-scatter inside a host", 0),
    (PAIRS, 1, "across", "reduce", "reduce-scatter between hosts", 3),
    (PAIRS, 1, "across", "gather", "all-gather inside a host", 3),  # where it is decoded
    (PAIRS, 1, "local", "gather", "all-gather inside a host", 2),  # rank 0 forwards what 2 owns
    (ALONE, 1, "across", "reduce", "reduce-scatter between hosts", 2),  # its only source
    (ALONE, 2, "across", "reduce", "reduce-scatter between hosts", 0),  # the deputy of rank 2
    (ALONE, 2, "across", "gather", "all-gather between hosts", 3),
]


@pytest.mark.parametrize(("table", "victim", "pair", "way", "hop", "sender"), HOPS, ids=str)
def test_corrupted_wire_names_its_sender(
    over_gloo: World, table: Table, victim: int, pair: str, way: str, hop: str, sender: int
) -> None:
    first, again = over_gloo.run(train_with_damage, table, victim, pair, way)[victim]
    assert first.type == "WireError"
    assert f"rank {victim}: bucket 0 of step 1, {hop} of chunk 1 of" in first.text
    assert f"corrupted wire from rank {sender}" in first.text
    assert again.text == first.text


def train_until_killed(rank: int, world_size: int, table: Table, dying: int) -> Raised:
    ddp = model()
    zcomm.compress(ddp, Hierarchy(across="lm4", hosts=table), timeout_s=TIMEOUT_S)
    for _ in range(3):  # DDP rebuilds its buckets in the second
        backward(ddp)
    if rank == dying:
        os._exit(9)
    return raised(backward, ddp)


# With unequal hosts: all of a host; the deputy of the rank that is alone; one that is no deputy.
@pytest.mark.parametrize(("table", "dying"), [(PAIRS, 2), (ALONE, 2), (ALONE, 0), (ALONE, 1)])
def test_dead_rank_is_named_by_all_others(table: Table, dying: int) -> None:
    found = run_ranks(4, train_until_killed, table, dying, expect_dead=[dying])
    for rank in {0, 1, 2, 3} - {dying}:
        assert found[rank].type == "CommunicationError"
        assert f"rank {dying}" in found[rank].text
        assert found[rank].seconds < TIMEOUT_S + 5


# On separate hosts: bytes at the network interface.


def bytes_between_hosts(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    """The bytes that leave this rank's host, with one hop and with two."""
    ways: dict[str, Any] = {
        "one": Hierarchy(across="lm4", hosts=1),
        "two": Hierarchy("int8", "lm4"),
        "by itself": "lm4",
    }
    return {
        name: {way: sent(make(codec), 2) for way, codec in ways.items()}
        for name, make in STEPS.items()
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_half_of_the_bytes_cross_between_two_hosts_of_two_ranks() -> None:
    for found in hosts.run(4, bytes_between_hosts, hosts=2, rate="1gbit"):
        for name, nbytes in found.items():
            assert 0.45 < nbytes["two"] / nbytes["one"] < 0.55, name
            assert 0.45 < nbytes["by itself"] / nbytes["one"] < 0.55, name
