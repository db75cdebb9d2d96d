"""The failure contract: every surviving rank raises in time and says what went wrong. No hangs."""

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
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import zcomm
from failing_training import TIMEOUT_S, DamagingChannel, backward, model
from raised import Raised, raised
from ranks import OVER_GLOO, World, run_ranks
from zcomm.engine.job import Job
from zcomm.engine.pipeline import Pipeline


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[World]:
    with World(3) as world:
        yield world


@pytest.fixture(scope="module")
def over_gloo() -> Iterator[World]:
    with World(3, env=OVER_GLOO) as world:
        yield world


# Ranks that are configured differently.

DIFFERENT: dict[str, tuple[object, object]] = {
    "codec": ("lm4", "int8"),
    "feedback": (True, 0.5),
    "start_step": (0, 10),
    "chunk_mb": (4, 2),
    "timeout_s": (60.0, 50.0),
    "verify": (True, False),
    "min_numel": (1024, 0),
    "residual_dtype": (torch.float32, torch.bfloat16),
}


def compress_differently(rank: int, world_size: int, by_hand: bool) -> dict[str, Raised]:
    found = {}
    for name, (common, other) in DIFFERENT.items():
        settings: dict[str, Any] = {name: other if rank == 1 else common}
        found[name] = _try_settings(by_hand, settings)
    scaler = torch.amp.GradScaler("cpu") if rank == 1 else None
    found["scaler"] = _try_settings(by_hand, {"scaler": scaler})
    return found


def _try_settings(by_hand: bool, settings: dict[str, Any]) -> Raised:
    ddp = model()
    if not by_hand:
        return raised(zcomm.compress, ddp, **settings)
    ddp.register_comm_hook(zcomm.HookState(**settings), zcomm.hook)
    return raised(backward, ddp)


@pytest.mark.parametrize("by_hand", [False, True], ids=["compress", "HookState"])
def test_settings_that_differ_are_named_on_every_rank(three_ranks: World, by_hand: bool) -> None:
    for rank, found in enumerate(three_ranks.run(compress_differently, by_hand)):
        for name, error in found.items():
            assert error.is_value_error, (name, error.text)
            assert f"rank {rank}: expected the same {name} on all ranks, got rank 0: " in error.text
            assert "rank 1: " in error.text
            assert "rank 2: " in error.text


def compress_other_model(rank: int, world_size: int) -> Raised:
    # DDP itself compares shapes, not names.
    inner = nn.ModuleDict({"first" if rank else "zeroth": nn.Linear(64, 64)})
    inner.forward = next(iter(inner.values())).forward
    return raised(zcomm.compress, DistributedDataParallel(inner))


def test_models_that_differ_are_refused(three_ranks: World) -> None:
    for error in three_ranks.run(compress_other_model):
        assert error.is_value_error
        assert "expected the same parameters on all ranks" in error.text


def call_differently(rank: int, world_size: int) -> list[Raised]:
    other = rank == 2
    x = torch.ones(5000)
    calls: list[dict[str, Any]] = [
        {"tensor": x, "codec": "int8" if other else "lm4"},
        {"tensor": x[:4000] if other else x},
        {"tensor": x, "op": "sum" if other else "mean"},
        {"tensor": x.bfloat16() if other else x},
        {"tensor": x, "feedback": zcomm.Feedback() if other else None},
    ]
    found = []
    for call in calls:
        # A failed engine stays failed, so each call gets its own group.
        group = dist.new_group([0, 1, 2])
        found.append(raised(zcomm.all_reduce, group=group, **call))
    return found


def test_calls_that_differ_are_refused_before_anything_is_read(three_ranks: World) -> None:
    for found in three_ranks.run(call_differently):
        for error in found:
            assert error.is_value_error, error.text
            assert "expected the same call on all ranks" in error.text
            assert "rank 2: all_reduce" in error.text


# Ranks that die or stop.


def train_until_signal(rank: int, world_size: int, victim: int, signal_: int) -> list[Raised]:
    ddp = model()
    zcomm.compress(ddp, "lm4", timeout_s=TIMEOUT_S)
    for _ in range(3):
        backward(ddp)
    if rank == victim:
        # In the middle of backward: after the last layer's bucket was submitted.
        ddp.module[0].weight.register_hook(lambda grad: os.kill(os.getpid(), signal_))
    return [raised(backward, ddp), raised(backward, ddp)]


ENV = pytest.mark.parametrize("env", [OVER_GLOO, {}], ids=["gloo", "shared memory"])


def of_the_dead(rank: int, env: dict[str, str], signal_: int = signal.SIGKILL) -> str:
    """How messages name the culprit: in shared memory a rank sees that a process has ended."""
    seen = not env and signal_ == signal.SIGKILL
    return rf"rank {rank} died" + ("" if seen else r" or stopped \(no answer for \d s\)")


@ENV
@pytest.mark.parametrize(
    ("victim", "signal_"),
    [(0, signal.SIGKILL), (2, signal.SIGKILL), (2, signal.SIGSTOP)],
    ids=["0 killed", "2 killed", "2 stopped"],
)
def test_rank_that_dies_or_stops_is_named_in_time(
    victim: int, signal_: int, env: dict[str, str]
) -> None:
    found = run_ranks(3, train_until_signal, victim, signal_, expect_dead=[victim], env=env)
    for rank in {0, 1, 2} - {victim}:
        first, again = found[rank]
        assert first.type == "CommunicationError"
        assert first.seconds < TIMEOUT_S + 0.5
        # The culprit first, gloo's words last.
        start = rf"rank {rank}: {of_the_dead(victim, env, signal_)} in bucket \d"
        where = r"(reduce-scatter of chunk \d of \d|before its first chunk)"
        assert re.fullmatch(rf"{start} of step 3, {where}( \[.*\])?", first.text), first.text
        # The error persists: no later call hangs or keeps training.
        assert again.text == first.text
        assert again.seconds < 1


def collective_without_peer(rank: int, world_size: int) -> Raised | None:
    group = dist.new_group([0, 1])
    zcomm.all_reduce(torch.ones(1000), group=group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return raised(zcomm.all_reduce, torch.ones(1000), group=group)


@ENV
def test_collective_of_a_dead_rank_raises(env: dict[str, str]) -> None:
    error = run_ranks(2, collective_without_peer, expect_dead=[1], env=env)[0]
    assert error.type == "CommunicationError"
    assert "all_reduce of 1000 elements" in error.text
    assert re.match(f"rank 0: {of_the_dead(1, env)} in ", error.text)


# Wires that arrive damaged.


def train_with_damage(rank: int, world_size: int, hop: str, byte: int) -> list[Raised]:
    ddp = model()
    handle = zcomm.compress(ddp, codec="int8")
    backward(ddp)
    if rank == 1:
        channel = getattr(handle._compressor.engine.transport.flat, hop)
        channel.__class__ = DamagingChannel
        channel.byte = byte
    return [raised(backward, ddp), raised(backward, ddp)]


@pytest.mark.parametrize("byte", [0, 9, 200], ids=["magic", "element count", "body"])
@pytest.mark.parametrize("hop", ["reduce", "gather"])
def test_corrupted_wire_names_its_sender(over_gloo: World, hop: str, byte: int) -> None:
    found = over_gloo.run(train_with_damage, hop, byte)
    first, again = found[1]
    assert first.type == "WireError"
    name = {"reduce": "reduce-scatter", "gather": "all-gather"}[hop]
    assert f"rank 1: bucket 0 of step 1, {name} of chunk 1 of" in first.text
    assert "corrupted wire from rank 2" in first.text
    assert "expected" in first.text
    assert again.text == first.text
    for rank in (0, 2):
        # The other ranks notice a failure in the second hop only at their next step.
        error = found[rank][hop == "gather"]
        assert error.type == "CommunicationError"
        assert "rank 1: WireError" in error.text
        assert error.seconds < 5  # long before any deadline


# Our own errors.


def train_with_fault(rank: int, world_size: int) -> list[Raised]:
    ddp = model()
    zcomm.compress(ddp, "lm4")
    backward(ddp)
    if rank == 2:
        original = Pipeline.sums

        def faulty(self: Pipeline, *args: Any) -> None:
            Pipeline.sums = original  # type: ignore[method-assign]
            raise KeyError("planted")

        Pipeline.sums = faulty  # type: ignore[method-assign]
    return [raised(backward, ddp) for _ in range(3)]


@pytest.mark.parametrize("world", ["over_gloo", "three_ranks"])
def test_exception_in_the_engine_is_raised_by_backward(
    world: str, request: pytest.FixtureRequest
) -> None:
    found = request.getfixturevalue(world).run(train_with_fault)
    assert [error.type for error in found[2]] == ["KeyError"] * 3
    assert found[2][0].text == "'planted'"
    for rank in (0, 1):
        assert [error.type for error in found[rank]] == ["CommunicationError"] * 3
        assert "rank 2: KeyError: 'planted'" in found[rank][0].text


def fail_to_complete(rank: int, world_size: int) -> Raised:
    """What is told of a job whose end raises, such as that of a hook's future."""
    group = dist.new_group(list(range(world_size)))
    original = Job.complete

    def complete(job: Job) -> None:
        Job.complete = original  # type: ignore[method-assign]
        raise KeyError("planted")

    def call() -> None:
        work = zcomm.all_reduce(torch.ones(100_000), "none", group, async_op=True)
        assert work is not None
        work.wait()

    Job.complete = complete  # type: ignore[method-assign]
    return raised(call)


@pytest.mark.parametrize("world", ["over_gloo", "three_ranks"])
def test_a_job_whose_end_raises_is_told(world: str, request: pytest.FixtureRequest) -> None:
    for error in request.getfixturevalue(world).run(fail_to_complete):
        assert error.type == "KeyError"


def thread_counts(rank: int, world_size: int) -> dict[str, list[int]]:
    """The threads left over from closed hooks and from dropped models."""
    before, left = _thread_count(), {}
    for kind in ("closed", "dropped", "dropped ZeRO"):
        ddp = model()
        owner = zcomm.ZeroOptimizer(ddp, optim.SGD) if "ZeRO" in kind else zcomm.compress(ddp)
        backward(ddp)
        with_engine = _thread_count() - before
        if kind == "closed":
            owner.close()
        else:
            del ddp, owner
            gc.collect()
        left[kind] = [with_engine, _threads_above(before)]
    return left


def _thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def _threads_above(count: int) -> int:
    """Waits up to a second: gloo's threads end by themselves."""
    for _ in range(100):
        if _thread_count() <= count:
            break
        time.sleep(0.01)
    return _thread_count() - count


def test_no_threads_are_left_behind(three_ranks: World) -> None:
    for left in three_ranks.run(thread_counts):
        for kind, (with_engine, without) in left.items():
            assert with_engine > 0, kind
            assert without <= 0, kind


def stop_engine(rank: int, world_size: int) -> Raised:
    ddp = model()
    handle = zcomm.compress(ddp, "lm4")
    backward(ddp)
    handle.close()
    return raised(backward, ddp)


def test_closed_hook_says_so(three_ranks: World) -> None:
    for error in three_ranks.run(stop_engine):
        assert "the engine was stopped" in error.text
