"""The failure contract under FSDP2: every rank raises in time and says what went wrong."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zcomm
import zcomm.fsdp
from ddp_training import batch
from failing_training import TIMEOUT_S, DamagingChannel
from fsdp_training import CAN_GO_ON, Branches, compress, sharded, slow_engine
from raised import Raised, raised
from ranks import OVER_GLOO, World, run_ranks


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[World]:
    with World(3) as world:
        yield world


def step(model: Any, rank: int = 0) -> None:
    model(batch(rank, 0)).square().mean().backward()


def assert_persists(first: Raised, again: Raised) -> None:
    """No later call hangs or keeps training. An older FSDP raises an error of its own there."""
    assert again.text == first.text or (not CAN_GO_ON and "mixed torch.Tensor" in again.text)


# Ranks that differ.

DIFFERENT: dict[str, tuple[object, object]] = {
    "codec": ("lm4", "int8"),
    "param_codec": (None, "int8"),
    "feedback": (True, False),
    "timeout_s": (60.0, 50.0),
    "residual_dtype": ("int8", "bf16"),
}


def compress_differently(rank: int, world_size: int) -> dict[str, Raised]:
    found = {
        name: raised(compress, sharded(None), **{name: other if rank == 1 else common})
        for name, (common, other) in DIFFERENT.items()
    }
    other = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(other[rank % 2])
    found["FSDP modules"] = raised(zcomm.fsdp.compress, fully_shard(other))
    return found


def test_settings_that_differ_are_named_on_every_rank(three_ranks: World) -> None:
    for rank, found in enumerate(three_ranks.run(compress_differently)):
        for name, error in found.items():
            assert error.is_value_error, (name, error.text)
            assert f"rank {rank}: expected the same {name} on all ranks, got rank 0: " in error.text
            assert "rank 1: " in error.text
            assert "rank 2: " in error.text


def use_differently(rank: int, world_size: int) -> list[Raised]:
    """Rank 2 uses different parameters from the rest; afterward the error persists."""
    model = sharded(None, 3, Branches)
    compress(model)
    step(model)
    model.other = rank == 2
    return [raised(step, model), raised(step, model)]


def test_ranks_that_use_other_parameters_are_told(three_ranks: World) -> None:
    for first, again in three_ranks.run(use_differently):
        assert first.is_value_error, first.text
        assert "expected the same call on all ranks" in first.text
        assert "rank 2: reduce-scatter of the root module in step 1: " in first.text
        assert "spare.weight as lm4" in first.text
        assert_persists(first, again)


# Ranks that die or stop.


def train_until_signal(rank: int, world_size: int, victim: int, number: int, when: str) -> Any:
    model = sharded(None, 3)
    compress(model, timeout_s=TIMEOUT_S)
    for _ in range(2):
        step(model)
    if rank == victim:
        layer = model.middle[0]
        if when == "forward":
            layer.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), number))
        else:
            layer.register_full_backward_hook(lambda *_: os.kill(os.getpid(), number))
    return [raised(step, model), raised(step, model)]


@pytest.mark.parametrize(
    ("victim", "number", "when"),
    [
        (0, signal.SIGKILL, "backward"),
        (2, signal.SIGKILL, "forward"),
        (2, signal.SIGSTOP, "backward"),
    ],
    ids=["0 killed", "2 killed", "2 stopped"],
)
def test_rank_that_dies_or_stops_is_named_in_time(victim: int, number: int, when: str) -> None:
    found = run_ranks(3, train_until_signal, victim, number, when, expect_dead=[victim])
    what = "all-gather of" if when == "forward" else "of"
    for rank in {0, 1, 2} - {victim}:
        first, again = found[rank]
        assert first.type == "CommunicationError"
        assert first.seconds < TIMEOUT_S + 1
        assert f"rank {rank}: " in first.text
        assert what in first.text
        assert "in step 2" in first.text
        assert f"rank {victim} died" in first.text
        assert_persists(first, again)
        assert again.seconds < 1


# Wires that arrive damaged.


def train_with_damage(rank: int, world_size: int, hop: str) -> list[Raised]:
    model = sharded(None, 3)
    handle = compress(model, param_codec="int8")
    step(model)
    if rank == 1:
        engine = next(iter(handle._compressor._engines.values()))
        channel = getattr(engine.transport.flat, hop)
        channel.__class__, channel.byte = DamagingChannel, 40
    return [raised(step, model), raised(step, model)]


@pytest.mark.parametrize("hop", ["reduce", "gather"])
def test_corrupted_wire_names_its_sender(hop: str) -> None:
    found = run_ranks(3, train_with_damage, hop, env=OVER_GLOO)
    first, again = found[1]
    assert first.type == "WireError", first.text
    name = {"reduce": "reduce-scatter", "gather": "all-gather"}[hop]
    assert re.match(f"rank 1: {name} of .* in step 1, {name} of chunk 1 of", first.text)
    assert "corrupted wire from rank 2" in first.text
    assert_persists(first, again)
    for rank in (0, 2):
        error = found[rank][0]
        assert error.type == "CommunicationError", error.text
        assert "rank 1: WireError" in error.text
        assert error.seconds < 10  # long before any deadline


# Errors elsewhere, and closing.


def fail_in_backward(rank: int, world_size: int) -> tuple[Raised, bool]:
    """A user error in backward(): FSDP can be reset, and training continues."""
    model = sharded(None, 3)
    compress(model)
    step(model)

    def fail(*_: object) -> None:
        raise KeyError("planted")

    planted = model.middle[0].register_full_backward_hook(fail)
    error = raised(step, model)
    planted.remove()
    model.reset_iter_state()
    model.zero_grad()
    again = sharded(None, 3)
    compress(again)
    with slow_engine():
        gradients = [gradient_of(one) for one in (model, again)]
    return error, torch.equal(*gradients)


def gradient_of(model: Any) -> Tensor:
    """The gradient, read as soon as backward() returns."""
    step(model)
    mine: Tensor = model.first.weight.grad.to_local().clone()
    return mine


@pytest.mark.skipif(not CAN_GO_ON, reason="this torch has no FSDPModule.reset_iter_state")
def test_training_goes_on_after_an_error_of_the_users_own(three_ranks: World) -> None:
    for error, equal in three_ranks.run(fail_in_backward):
        assert error.type == "KeyError"
        assert equal


def ends(rank: int, world_size: int) -> dict[str, Any]:
    """The remaining threads, and what a closed model does."""
    found: dict[str, Any] = {}
    before = thread_count()
    for kind in ("closed", "dropped"):
        model = sharded(None, 3)
        handle = compress(model)
        step(model)
        with_engine = thread_count() - before
        if kind == "closed":
            model.first.unshard(async_op=True)  # in flight
            handle.close()
            step(model)  # with torch's own collectives
            compress(model).close()  # and a second time
        del model, handle
        gc.collect()
        found[kind] = with_engine, threads_above(before)
    return found


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def threads_above(count: int) -> int:
    """Waits up to a second: gloo's threads end by themselves."""
    for _ in range(100):
        if thread_count() <= count:
            break
        time.sleep(0.01)
    return thread_count() - count


def test_a_closed_model_goes_on_uncompressed_and_no_threads_stay(three_ranks: World) -> None:
    for found in three_ranks.run(ends):
        for kind, (with_engine, left) in found.items():
            assert with_engine > 0, kind
            assert left <= 0, kind
