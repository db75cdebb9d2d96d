"""Two hops in training: the hook, ZeRO, checkpoints, failures, and separate hosts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import Net, assert_equal_replicas, seeded, train
from everyones import everyones
from failing_training import TIMEOUT_S, DamagingChannel, backward, model
from raised import Raised, raised
from ranks import OVER_GLOO, World, run_ranks
from zcomm import Hierarchy
from zcomm.launch import hosts
from zero_training import difference, plain, trained, zero

pytest_plugins = ["zero_ranks"]


# The hook.


def hooked(rank: int, world_size: int, settings: dict[str, Any]) -> Any:
    ddp = DistributedDataParallel(seeded(Net), bucket_cap_mb=0.05)
    handle = zcomm.compress(ddp, **settings)
    result = train(ddp, rank, handle)
    sizes = handle.residual_nbytes()
    handle.close()
    return result, sizes


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_hook_loses_nothing_and_replicas_are_equal(quartet: World, dtype: str) -> None:
    settings = {"feedback": True, "residual_dtype": dtype, "min_numel": 0, "chunk_mb": 1 / 16}
    one = quartet.run(hooked, {"codec": "int4", **settings})
    two = quartet.run(hooked, {"codec": Hierarchy(across="int4", hosts=2), **settings})
    for found in (one, two):
        assert_equal_replicas([outcome for outcome, _ in found])
        bound = {"fp32": 1e-6, "bf16": 2e-3, "int8": 2e-3}[dtype]
        assert max(outcome.gap for outcome, _ in found) < bound
    # Residuals of what goes to the owners of one column, half of the model, and of the owned part.
    flat, halves = (sum(nbytes for _, nbytes in found) for found in (one, two))
    assert halves / flat == pytest.approx((1 / 2 + 1 / 4) / (1 + 1 / 4), rel=0.02)


def test_hook_without_codecs_is_plain_ddp_to_rounding(quartet: World) -> None:
    plain_ddp = quartet.run(hooked, {"codec": "none"})
    two_hops = quartet.run(hooked, {"codec": Hierarchy(across="none", hosts=2)})
    for (expected, _), (got, _) in zip(plain_ddp, two_hops):
        assert difference(expected.parameters, got.parameters) < 1e-6


def state_of_other_hosts(rank: int, world_size: int) -> Raised:
    settings: dict[str, Any] = {"feedback": True}
    first = zcomm.compress(wrapped(), Hierarchy(hosts=2), **settings)
    state = first.state_dict()
    again = zcomm.compress(wrapped(), Hierarchy(hosts=2), **settings)
    again.load_state_dict(state)
    other = zcomm.compress(wrapped(), Hierarchy(hosts=[[0, 2], [1, 3]]), **settings)
    found = raised(other.load_state_dict, state)
    for handle in (first, again, other):
        handle.close()
    return found


def wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(seeded(Net))


def test_hook_state_of_other_hosts_is_refused(quartet: World) -> None:
    for error in quartet.run(state_of_other_hosts):
        assert error.is_value_error
        assert "expected hosts '[[0, 2], [1, 3]]', got '[[0, 1], [2, 3]]'" in error.text


# ZeRO.


def sharded(rank: int, world_size: int, options: dict[str, Any]) -> tuple[float, float]:
    """How far ZeRO with two hops is from plain DDP, and ranks are from each other."""
    expected = trained(plain(optim.AdamW, lr=1e-2), rank)
    make = zero(optim.AdamW, Hierarchy(across="none", hosts=2), lr=1e-2, **options)
    got = trained(make, rank)
    same = all(difference(got, other) == 0.0 for other in everyones(got))
    return difference(expected, got), float(not same)


def test_zero_over_two_hops_is_plain_adamw_to_rounding(quartet: World) -> None:
    for far, apart in quartet.run(sharded, {}):
        assert far < 1e-5
        assert apart == 0.0


def test_zero_with_coded_parameters_keeps_replicas_equal(quartet: World) -> None:
    for far, apart in quartet.run(sharded, {"param_codec": "int8", "min_numel": 0}):
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


@pytest.mark.parametrize("ways", [(2, None), (None, 2), (2, 2), (2, [[0, 3], [1, 2]])], ids=str)
def test_residuals_are_conserved_from_hosts_to_hosts(
    quartet: World, tmp_path: Path, ways: tuple[Any, Any]
) -> None:
    assert max(quartet.run(saved_and_loaded, str(tmp_path), ways)) < 1e-6


# Failures.


@pytest.fixture(scope="module")
def over_gloo() -> Iterator[World]:
    with World(4, env=OVER_GLOO) as world:
        yield world


def train_with_damage(rank: int, world_size: int, pair: str, way: str) -> list[Raised]:
    ddp = model()
    handle = zcomm.compress(ddp, Hierarchy("int8", "int8", hosts=2))
    backward(ddp)
    if rank == 1:
        channel = getattr(getattr(handle._compressor.engine.transport, pair), way)
        channel.__class__ = DamagingChannel
    return [raised(backward, ddp), raised(backward, ddp)]


HOPS = {
    ("local", "reduce"): ("reduce-scatter inside a host", 0),
    ("across", "reduce"): ("reduce-scatter between hosts", 3),
    ("across", "gather"): ("all-gather inside a host", 3),  # detected where it is decoded
    ("local", "gather"): ("all-gather inside a host", 2),  # rank 0 forwards what 2 owns
}


@pytest.mark.parametrize(("pair", "way"), list(HOPS), ids=str)
def test_corrupted_wire_names_its_sender(over_gloo: World, pair: str, way: str) -> None:
    found = over_gloo.run(train_with_damage, pair, way)
    first, again = found[1]
    hop, sender = HOPS[pair, way]
    assert first.type == "WireError"
    assert f"rank 1: bucket 0 of step 1, {hop} of chunk 1 of" in first.text
    assert f"corrupted wire from rank {sender}" in first.text
    assert again.text == first.text


def train_until_killed(rank: int, world_size: int) -> Raised:
    ddp = model()
    zcomm.compress(ddp, Hierarchy(hosts=2), timeout_s=TIMEOUT_S)
    for _ in range(3):  # DDP rebuilds its buckets in the second
        backward(ddp)
    if rank == 2:
        os._exit(9)
    return raised(backward, ddp)


def test_dead_rank_is_named_by_all_others() -> None:
    found = run_ranks(4, train_until_killed, expect_dead=[2])
    for rank in (0, 1, 3):
        assert found[rank].type == "CommunicationError"
        assert "rank 2" in found[rank].text
        assert found[rank].seconds < TIMEOUT_S + 5


# On separate hosts: bytes at the network interface.


def bytes_between_hosts(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    """The bytes that leave this host per rank, with one hop and with two."""
    ways: dict[str, Any] = {
        "one": Hierarchy(across="lm4", hosts=1),
        "two": Hierarchy("int8", "lm4"),
        "by itself": "lm4",
    }
    return {name: {k: sent(way(codec)) for k, codec in ways.items()} for name, way in WAYS.items()}


def sent(step: Callable[[], object]) -> float:
    step()  # creates engines and rebuilds DDP's buckets
    dist.barrier()
    before = hosts.sent_bytes()
    step()
    dist.barrier()
    return hosts.sent_bytes() - before


def collective(codec: Any) -> Callable[[], object]:
    x = torch.randn(1_000_000)
    return lambda: zcomm.all_reduce(x, codec)


def wide() -> DistributedDataParallel:
    return DistributedDataParallel(seeded(lambda: nn.Linear(1000, 1000)))


def hook_step(codec: Any) -> Callable[[], object]:
    ddp = wide()
    zcomm.compress(ddp, codec)
    return lambda: [ddp(torch.randn(4, 1000)).sum().backward() for _ in range(3)]


def zero_step(codec: Any) -> Callable[[], object]:
    ddp = wide()
    opt = zcomm.ZeroOptimizer(ddp, optim.SGD, codec=codec, param_codec="int8", lr=0.1)

    def steps() -> None:
        for _ in range(3):
            ddp(torch.randn(4, 1000)).sum().backward()
            opt.step()

    return steps


WAYS = {"all_reduce": collective, "hook": hook_step, "ZeRO": zero_step}


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_half_of_the_bytes_cross_between_two_hosts_of_two_ranks() -> None:
    for found in hosts.run(4, bytes_between_hosts, hosts=2, rate="1gbit"):
        for name, nbytes in found.items():
            assert 0.45 < nbytes["two"] / nbytes["one"] < 0.55, name
            assert 0.45 < nbytes["by itself"] / nbytes["one"] < 0.55, name
