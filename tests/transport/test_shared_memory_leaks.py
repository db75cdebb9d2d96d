"""Shared memory leaves nothing behind: no descriptors, no mappings, no memory, no processes."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zcomm
from everyones import everyones
from leaving_training import call_and_go
from ranks import World
from segment_party import mapped_segments, open_fds
from shared_ranks import group_over, ring_of
from zcomm.launch import ranks as real_ranks

FAULTS = os.environ.get("ZCOMM_FAULTS", "short")
GROUPS = 200 if FAULTS == "all" else 30
CALLS = 10_000
# What an allocator may hold back.
SLACK_KIB = 2048


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[World]:
    with World(2) as world:
        yield world


def resident_kib() -> int:
    [line] = [s for s in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in s]
    return int(line.split()[1])


def held() -> tuple[int, int, int]:
    gc.collect()
    return open_fds(), len(mapped_segments()), len(os.listdir("/proc/self/task"))


def call_often(rank: int, world_size: int) -> tuple[list[tuple[int, int, int]], int]:
    """What is held before and after, and how much the memory of this process has grown."""
    group = group_over("ring", range(2))
    x, y = torch.ones(300), torch.ones(2000)

    def call(times: int) -> None:
        for i in range(times):
            zcomm.all_reduce(x if i % 4 else y, "none" if i % 4 else "lm4", group)

    call(CALLS // 10)
    before, resident = held(), resident_kib()
    call(CALLS)
    return [before, held()], resident_kib() - resident


def test_ten_thousand_calls_hold_nothing(two_ranks: World) -> None:
    for (before, after), grown_kib in two_ranks.run(call_often):
        assert after == before
        assert grown_kib < SLACK_KIB


def make_and_destroy(rank: int, world_size: int, groups: int) -> tuple[list[tuple[int, ...]], int]:
    """Torch keeps the addresses of gloo's ranks in its store, so memory grows a little."""
    found, resident, others = [], 0, len(mapped_segments())
    for i in range(groups):
        group = group_over("ring", range(2))
        zcomm.all_reduce(torch.ones(100_000), "lm4", group)
        assert len(mapped_segments()) <= others + 2  # the engine before this one is gone
        dist.destroy_process_group(group)
        del group
        if i in (4, groups - 1):
            found.append(settled())
            resident = resident_kib() - resident
    return found, resident


def settled() -> tuple[int, int, int]:
    """The threads of the last group may take a moment."""
    before = held()
    while time.sleep(0.2) is None and (now := held()) != before:
        before = now
    return before


def test_groups_that_are_destroyed_leave_nothing(two_ranks: World) -> None:
    for (before, after), grown_kib in two_ranks.run(make_and_destroy, GROUPS):
        assert after == before
        assert grown_kib < SLACK_KIB + 20 * GROUPS


def files_of_segments(rank: int, world_size: int) -> list[tuple[int, list[int]]]:
    """Each rank's pid and the inode of its segment; its processes are killed after that."""
    memory = ring_of(group_over("ring", range(world_size)))._memory
    mine = os.fstat(memory.segment.fd).st_ino
    assert mine in mapped_inodes(Path("/proc/self/maps"))
    found: list[tuple[int, list[int]]] = everyones((os.getpid(), [mine]))
    return found


def mapped_inodes(maps: Path) -> set[int]:
    try:
        lines = maps.read_text().splitlines()
    except OSError:  # its process has ended
        return set()
    return {int(line.split()[4]) for line in lines if "memfd:zcomm" in line}


def test_nothing_is_left_of_ranks_that_were_killed() -> None:
    shm = set(os.listdir("/dev/shm"))
    world = World(2)
    try:
        said = world.run(files_of_segments)[0]
    finally:
        world._kill()
    inodes = {inode for _, of_rank in said for inode in of_rank}
    left = set().union(*(mapped_inodes(maps) for maps in Path("/proc").glob("[0-9]*/maps")))
    assert len(inodes) == 2
    assert not inodes & left
    assert not {name for name in set(os.listdir("/dev/shm")) - shm if "zcomm" in name}


def test_processes_end_with_calls_under_way() -> None:
    """Whole interpreters, which also run what is registered for their end."""
    started = time.monotonic()
    with real_ranks.World(2) as world:  # whose end fails if an exit code is not 0
        world.run(call_and_go)
        ended = time.monotonic()
    print(f"{ended - started:.1f} s to start, {time.monotonic() - ended:.1f} s to end")
    assert time.monotonic() - ended < 9.0
