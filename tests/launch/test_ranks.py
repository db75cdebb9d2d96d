"""The runner that other tests use: results, errors, hangs and deaths of ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ranks import World, run_ranks


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(3) as world:
        yield world


def sum_of_ranks(rank: int, world_size: int, factor: float) -> tuple[int, torch.Tensor]:
    x = torch.full((1000,), factor * rank)
    dist.all_reduce(x)
    return rank, x


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def fail_on(rank: int, world_size: int, failing: list[int]) -> None:
    if rank in failing:
        raise ValueError(f"complaint of rank {rank}")
    dist.barrier()


def get_signal(rank: int, world_size: int, signals: dict[int, int]) -> str:
    if rank in signals:
        os.kill(os.getpid(), signals[rank])
    time.sleep(0.2)
    return f"rank {rank} lives"


def sleep(rank: int, world_size: int) -> None:
    time.sleep(1000 * rank)


def test_results_come_in_rank_order(world: World) -> None:
    results = world.run(sum_of_ranks, 2.0)
    assert [rank for rank, _ in results] == [0, 1, 2]
    for _, total in results:
        assert torch.equal(total, torch.full((1000,), 6.0))


def test_ranks_stay_from_run_to_run(world: World) -> None:
    first = world.run(process_id)
    assert len({os.getpid(), *first}) == 4
    assert world.run(process_id) == first


def test_failing_ranks_show_their_tracebacks_and_all_are_ended(world: World) -> None:
    pids = world.run(process_id)
    with pytest.raises(AssertionError) as caught:
        world.run(fail_on, [1, 2])
    message = str(caught.value)
    assert message.startswith(("rank 1: Traceback", "rank 2: Traceback"))
    assert message.count("in fail_on") == 2
    assert "ValueError: complaint of rank 1" in message
    assert "ValueError: complaint of rank 2" in message
    assert "rank 0: still running" in message
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_hang_is_ended_in_time_and_shows_where(world: World) -> None:
    world.run(process_id)  # starts the ranks: the time below is for the call alone
    start = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        world.run(sleep, timeout_s=0.5)
    assert time.monotonic() - start < 10
    message = str(caught.value)
    assert "rank 0" not in message
    assert "rank 1: not finished after 0.5 s" in message
    assert "rank 2: not finished after 0.5 s" in message
    assert message.count("in sleep") == 2


def test_a_killed_rank_is_reported(world: World) -> None:
    with pytest.raises(AssertionError, match=r"^rank 1: died: SIGKILL"):
        world.run(get_signal, {1: signal.SIGKILL})


def test_ranks_that_may_die_or_stop_give_none() -> None:
    signals = {0: signal.SIGKILL, 2: signal.SIGSTOP}
    results = run_ranks(3, get_signal, signals, expect_dead=signals)
    assert results == [None, "rank 1 lives", None]
