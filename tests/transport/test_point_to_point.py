"""Sends and receives over the user's group: they end within timeout_s and name the culprit."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import optim

import zcomm
from failing_training import backward, model
from raised import Raised, raised
from ranks import World
from zcomm.transport.handshake import Caller
from zcomm.transport.point_to_point import PointToPoint
from zcomm.zero import consolidate

TIMEOUT_S = 2.0
LATE_S = 2.0
GROUP_TIMEOUT_S = 30.0
HUB = 0
CONSOLIDATE, LOAD = "consolidated_state_dict", "load_state_dict"
STOP, KILL = signal.SIGSTOP, signal.SIGKILL


@pytest.fixture
def three_ranks() -> Iterator[World]:
    with World(3, group_timeout_s=GROUP_TIMEOUT_S) as world:
        yield world


def call_of(rank: int, name: str) -> Callable[[], Any]:
    """A call in which rank 0 gathers the state, or sends it to all others."""
    ddp = model()
    optimizer = zcomm.ZeroOptimizer(ddp, optim.Adam, lr=0.1, timeout_s=TIMEOUT_S)
    backward(ddp)
    optimizer.step()
    if name == CONSOLIDATE:
        return lambda: optimizer.consolidated_state_dict(HUB)
    state = optimizer.consolidated_state_dict(HUB)
    return lambda: optimizer.load_state_dict(state)


def before_second_tensor(act: Callable[[], None]) -> None:
    """Runs `act` on this rank in the middle of its next call."""
    count = 0

    def acting(send: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == 2:
                act()
            return send(*args, **kwargs)

        return wrapper

    for name in ("_gathered", "_run"):
        setattr(consolidate, name, acting(getattr(consolidate, name)))


def lose_a_rank(rank: int, world_size: int, name: str, victim: int, signal_: int) -> Raised:
    call = call_of(rank, name)
    if rank == victim:
        before_second_tensor(lambda: os.kill(os.getpid(), signal_))
    return raised(call)


@pytest.mark.parametrize(
    ("name", "victim", "signal_"),
    [
        (CONSOLIDATE, 1, STOP),
        (CONSOLIDATE, 2, KILL),
        (CONSOLIDATE, HUB, STOP),
        (LOAD, 1, STOP),
        (LOAD, 1, KILL),
        (LOAD, HUB, KILL),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else str(value),
)
def test_a_rank_lost_in_the_middle_is_named_in_time(
    three_ranks: World, name: str, victim: int, signal_: int
) -> None:
    found = three_ranks.run(lose_a_rank, name, victim, signal_, expect_dead=[victim])
    perhaps = ", or waits for a rank that did," if victim == HUB else ""
    for rank in {0, 1, 2} - {victim}:
        error = found[rank]
        assert error.type == "CommunicationError", error.text
        silent = rf"rank {victim} died or stopped \(no answer for \d s\){perhaps}"
        # The culprit first, gloo's words last.
        assert re.fullmatch(rf"rank {rank}: {silent} in {name} \[.+\]", error.text), error.text
        assert error.seconds < TIMEOUT_S + LATE_S


def be_late(rank: int, world_size: int, name: str) -> Raised:
    call = call_of(rank, name)
    if rank == 1:
        before_second_tensor(lambda: time.sleep(TIMEOUT_S / 2))
    return raised(call)


@pytest.mark.parametrize("name", [CONSOLIDATE, LOAD])
def test_a_rank_that_is_late_is_waited_for(three_ranks: World, name: str) -> None:
    found = three_ranks.run(be_late, name)
    assert [error.text for error in found] == ["None"] * 3
    assert found[1].seconds > TIMEOUT_S / 2


def wait_for_each_other(rank: int, world_size: int) -> Raised:
    """Nobody sends."""
    peers = PointToPoint(Caller("a call", None, TIMEOUT_S), "waiting", HUB)
    return raised(peers.recv, torch.zeros(3), HUB if rank else 1)


def test_ranks_that_wait_for_each_other_are_not_called_dead(three_ranks: World) -> None:
    for rank, error in enumerate(three_ranks.run(wait_for_each_other)):
        start = f"rank {rank}: all ranks are alive, but this did not finish: a call ["
        assert error.text.startswith(start), error.text
        assert error.seconds < TIMEOUT_S + LATE_S
