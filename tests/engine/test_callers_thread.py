"""Which code takes a job through its steps, in whose thread, and what it counts."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zcomm
from ranks import World
from shared_ranks import engine_of, group_over, in_chunks
from zcomm.engine.engine import Engine
from zcomm.engine.host import HostRunner, Turns
from zcomm.engine.job import Job

WAYS = ("ring", "gloo")
SMALL, LARGE = 300, 300_000


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[World]:
    with World(3) as world:
        yield world


def loops(rank: int, world_size: int) -> dict[str, tuple[str, bool]]:
    """The last loop in the ring that each call took, and whether it was in the caller's thread."""
    group, caller = group_over("ring", range(3)), threading.get_ident()
    native, turns = HostRunner._run_native, Turns.run
    seen: list[tuple[str, bool]] = []

    def note(loop: str) -> None:
        seen.append((loop, threading.get_ident() == caller))

    def run_native(runner: HostRunner, loop: Any, *args: Any, **how: Any) -> Any:
        note(type(loop).__name__)
        return native(runner, loop, *args, **how)

    def run_turns(job: Turns) -> None:
        note("Turns")
        turns(job)

    def last(x: torch.Tensor, codec: str, async_op: bool = False) -> tuple[str, bool]:
        zcomm.all_reduce(torch.ones(1), "none", group)  # ranks come together: none is late
        work = zcomm.all_reduce(x, codec, group, async_op=async_op)
        if work is not None:
            work.wait()
        return seen[-1]

    HostRunner._run_native, Turns.run = run_native, run_turns  # type: ignore[method-assign]
    try:
        return {
            "plain": last(torch.ones(LARGE), "none"),
            "coded": last(torch.ones(LARGE), "lm4"),
            "half": last(in_chunks(torch.ones(LARGE)), "lm4"),
            "async": last(torch.ones(SMALL), "lm4", async_op=True),
        }
    finally:
        HostRunner._run_native, Turns.run = native, turns  # type: ignore[method-assign]


def test_native_loops_take_all_jobs_that_need_no_python(three_ranks: World) -> None:
    expected = {"plain": "Plain", "coded": "Coded", "half": "Turns", "async": "Coded"}
    for seen in three_ranks.run(loops):
        assert seen == {kind: (loop, False) for kind, loop in expected.items()}


def submitted(rank: int, world_size: int, way: str, codec: str) -> int:
    """How many of 20 small jobs were left to the engine's thread."""
    group = group_over(way, range(3))
    engine, left = engine_of(group), []
    put = engine._inbox.put
    engine._inbox.put = lambda job: (left.append(job), put(job))  # type: ignore[method-assign]
    for _ in range(20):
        zcomm.all_reduce(torch.ones(SMALL), codec, group)
    del engine._inbox.put
    return len(left)


@pytest.mark.parametrize("codec", ["none", "lm4"])
@pytest.mark.parametrize("way", WAYS)
def test_callers_run_small_jobs_themselves(three_ranks: World, way: str, codec: str) -> None:
    for left in three_ranks.run(submitted, way, codec):
        assert left < 10  # a rank may be late


def wait_for_a_late_rank(rank: int, world_size: int, way: str) -> tuple[bool, bool, bool]:
    """Rank 2 comes late to a small job: who finished it, whether it is right, and whether it is
    gone afterwards, without the collector's help."""
    group = group_over(way, range(3))
    jobs: list[weakref.ref[Job]] = []
    submit = Engine.submit

    def noted(engine: Engine, job: Job) -> None:
        jobs.append(weakref.ref(job))
        submit(engine, job)

    x = torch.full((SMALL,), float(rank))
    gc.disable()
    Engine.submit = noted  # type: ignore[method-assign]
    try:
        time.sleep(0.3 if rank == 2 else 0.0)
        begun = engine_of(group)._inbox._put
        zcomm.all_reduce(x, "none", group)
        handed_over = engine_of(group)._inbox._put > begun
        for _ in range(100):
            if jobs[0]() is None:
                break
            time.sleep(0.01)
        return handed_over, bool((x == 1).all()), jobs[0]() is None
    finally:
        Engine.submit = submit  # type: ignore[method-assign]
        gc.enable()


@pytest.mark.parametrize("way", WAYS)
def test_the_engine_goes_on_with_a_job_whose_ranks_are_late(three_ranks: World, way: str) -> None:
    results = three_ranks.run(wait_for_a_late_rank, way)
    assert [handed_over for handed_over, *_ in results[:2]] == [True, True]
    for _, right, gone in results:
        assert right
        assert gone


def counted(rank: int, world_size: int, codec: str) -> list[int]:
    """The bytes of a small all-reduce, over both transports."""
    found = []
    for way in WAYS:
        group = group_over(way, range(3))
        before = engine_of(group).counters.wire_bytes
        zcomm.all_reduce(torch.ones(SMALL), codec, group)
        found.append(engine_of(group).counters.wire_bytes - before)
    return found


@pytest.mark.parametrize("codec", ["none", "lm4"])
def test_every_peer_reads_all_of_a_small_all_reduce(three_ranks: World, codec: str) -> None:
    for ring, gloo in three_ranks.run(counted, codec):
        headers = gloo - ring
        assert headers == 0 if codec == "lm4" else 0 < headers < gloo / 5
