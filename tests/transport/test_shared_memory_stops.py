"""Ranks that share memory and stop, are slow or fail by themselves: nobody waits in vain."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from dying_ranks import at
from everyones import everyones
from raised import Raised, raised
from ranks import World, run_ranks
from shared_ranks import engine_of, group_over, in_chunks
from zcomm.engine.pipeline import Pipeline

TIMEOUT_S = 2.0
LATE_S = 2.0
NUMEL = 400_000
CODECS = {"chunks": "lm4", "coded loop": "int8", "plain loop": "none"}
SLOTS = {"lm4": 40 << 10, "int8": 80 << 10, "none": 4096}


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[World]:
    with World(3) as world:
        yield world


def reduce(group: Any, codec: str) -> Tensor:
    x = torch.full((NUMEL,), 3.0 * dist.get_rank())
    x = in_chunks(x) if codec == "lm4" else x
    zcomm.all_reduce(x, codec, group)
    return x


def stop(rank: int, world_size: int) -> list[Raised]:
    """Rank 1 stands still: in one group in the midst of chunks, in the other one somewhere."""
    codecs = ("lm4", "none")
    groups = [group_over("ring", range(3), SLOTS[c], TIMEOUT_S) for c in codecs]
    dist.barrier()
    if rank == 1:
        at("after publish", 3, partial(os.kill, os.getpid(), signal.SIGSTOP))
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(partial(raised, reduce), groups, codecs))


def test_a_stopped_rank_is_named_at_the_deadline() -> None:
    found = run_ranks(3, stop, expect_dead=[1])
    for rank in (0, 2):
        for error in found[rank]:
            assert error.type == "CommunicationError"
            start = f"rank {rank}: rank 1 died or stopped (no answer for 2 s) in all_reduce"
            assert error.text.startswith(start), error.text
            assert TIMEOUT_S - 1 < error.seconds < TIMEOUT_S + LATE_S


def pause(rank: int, world_size: int, codec: str) -> float:
    """Rank 0 stops rank 1 in the midst of many calls, for a second."""
    group = group_over("ring", range(3), SLOTS[codec], TIMEOUT_S)
    pids = everyones(os.getpid())
    if rank == 0:
        threading.Timer(0.1, os.kill, [pids[1], signal.SIGSTOP]).start()
        threading.Timer(1.1, os.kill, [pids[1], signal.SIGCONT]).start()
    started, expected = time.monotonic(), reduce(group, codec)
    while not agreed(time.monotonic() - started > 1.2, group):
        assert torch.equal(reduce(group, codec), expected)
    return time.monotonic() - started


def agreed(enough: bool, group: Any) -> bool:
    votes = torch.tensor([float(enough)])
    zcomm.all_reduce(votes, "none", group)
    return bool(votes)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_rank_that_goes_on_in_time_changes_nothing(three_ranks: World, codec: str) -> None:
    assert min(three_ranks.run(pause, codec)) > 1.0


def be_slow(rank: int, world_size: int, codec: str) -> None:
    group = group_over("ring", range(3), SLOTS[codec], TIMEOUT_S)
    expected = reduce(group, codec)
    if rank == 2:
        time.sleep(1.0)
    assert torch.equal(reduce(group, codec), expected)
    if rank == 1:
        at("after publish", 2, partial(time.sleep, 1.0))
    assert torch.equal(reduce(group, codec), expected)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_slow_rank_is_waited_for(three_ranks: World, codec: str) -> None:
    three_ranks.run(be_slow, codec)


# Failures of one rank.


def fail_alone(rank: int, world_size: int, step: str) -> list[Raised]:
    group = group_over("ring", range(3), SLOTS["lm4"])
    original, left = getattr(Pipeline, step), [3]

    def faulty(self: Pipeline, *args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyError("planted")
        original(self, *args)

    if rank == 1:
        setattr(Pipeline, step, faulty)
    try:
        return [raised(reduce, group, "lm4") for _ in range(2)]
    finally:
        setattr(Pipeline, step, original)


@pytest.mark.parametrize("step", ["encode", "encode_sum", "decode"])
def test_an_error_of_one_rank_ends_the_others_at_once(three_ranks: World, step: str) -> None:
    for rank, (first, again) in enumerate(three_ranks.run(fail_alone, step)):
        if rank == 1:
            assert (first.type, first.text) == ("KeyError", "'planted'")
        else:
            assert first.type == "CommunicationError"
            assert f"rank {rank}: rank 1 failed in all_reduce of" in first.text
            assert first.text.endswith(": rank 1: KeyError: 'planted'")
        assert first.seconds < 5  # the deadline is a minute
        assert again.text == first.text
        assert again.seconds < 0.5


def close_while_waiting(rank: int, world_size: int) -> tuple[float, Raised] | None:
    """Rank 0 gives up a call that the others never make."""
    group = group_over("ring", range(3))
    if rank:
        return None
    work = zcomm.all_reduce(torch.ones(NUMEL), "lm4", group, async_op=True)
    assert work is not None
    time.sleep(0.1)
    started = time.monotonic()
    engine_of(group).stop()
    return time.monotonic() - started, raised(work.wait)


def test_an_engine_that_waits_can_be_stopped(three_ranks: World) -> None:
    seconds, error = three_ranks.run(close_while_waiting)[0]
    assert seconds < 2.0
    assert "the engine was stopped" in error.text
