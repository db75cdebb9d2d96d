"""A rank that writes garbage where it may write: its peers refuse it. Nobody crashes or waits."""

from __future__ import annotations

import ctypes
import random
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from dying_ranks import at
from raised import Raised, raised
from ranks import World
from shared_ranks import group_over, in_chunks, ring_of
from zcomm import _core
from zcomm.transport.shared_memory.ring import SLOTS, Counter, Ring

TIMEOUT_S = 20.0
LM4_SLOT = 40 << 10
# Where csrc/shm/ring.h has them.
LINE = 64
ASLEEP_ON, GAVE_UP = 3 * LINE, 4 * LINE


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[World]:
    with World(3) as world:
        yield world


def write(ring: Ring, offset: int, data: bytes) -> None:
    """Into this rank's own segment."""
    ctypes.memmove(ring._memory.segment.address + offset, data, len(data))


def read(ring: Ring, offset: int, nbytes: int) -> bytes:
    return ctypes.string_at(ring._memory.segment.address + offset, nbytes)


def move(counter: Counter, by: int, ring: Ring) -> None:
    [value] = struct.unpack("I", read(ring, counter * LINE, 4))
    write(ring, counter * LINE, struct.pack("I", (value + by) % (1 << 32)))


def fill(offset: int, data: bytes, ring: Ring) -> None:
    write(ring, offset, data)


def noise(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def spoil_slots(data: bytes, at: int, ring: Ring) -> None:
    """In all slots: one of them is about to be published."""
    for i in range(SLOTS):
        write(ring, _core.CONTROL_NBYTES + i * ring.slot_nbytes + at, data)


COUNTERS: dict[str, Callable[[Ring], None]] = {
    f"{counter.name.lower()} {by:+}": partial(move, counter, by)
    for counter in Counter
    for by in (-20, 20, 1 << 31)
}
SLOT_BYTES: dict[str, Callable[[Ring], None]] = {
    "a bit": partial(spoil_slots, b"\x5a", 300),
    "a header": partial(spoil_slots, b"\xff" * 32, 0),
    "noise": partial(spoil_slots, noise(LM4_SLOT), 0),
    "zeros": partial(spoil_slots, bytes(LM4_SLOT), 0),
}
PAGES: dict[str, Callable[[Ring], None]] = {
    "noise": partial(fill, 0, noise(4096)),
    "ones": partial(fill, 0, b"\xff" * 4096),
    "zeros": partial(fill, 0, bytes(4096)),
    "gave up": partial(fill, GAVE_UP, b"\xff" * 64),
}


def reduce(group: Any, codec: str) -> torch.Tensor:
    x = torch.linspace(-1, 1, 400_000)
    x = in_chunks(x) if codec == "lm4" else x
    zcomm.all_reduce(x, codec, group)
    return x


def spoil(
    rank: int, world_size: int, acts: dict[str, Callable[[Ring], None]], codec: str
) -> dict[str, Raised]:
    """Rank 1 writes while its engine's thread stands still: in a chunk, or between two jobs."""
    found = {}
    for name, act in acts.items():
        group = group_over("ring", range(3), LM4_SLOT, TIMEOUT_S)
        ring = ring_of(group)
        reduce(group, codec)
        dist.barrier()

        def write_and_wait(act: Any = act, ring: Any = ring) -> None:
            act(ring)
            time.sleep(0.1)

        if rank == 1 and codec == "lm4":
            at("before publish", 3, write_and_wait)
        elif rank == 1:
            write_and_wait()
        found[name] = raised(reduce, group, codec)
    return found


def by_case(found: list[dict[str, Raised]]) -> Iterator[tuple[str, list[Raised]]]:
    for name in found[0]:
        errors = [of_rank[name] for of_rank in found]
        print(name, *(f"{error.type}: {error.text}" for error in errors), sep="\n    ")
        yield name, errors


def expect_refusal(errors: list[Raised], refused: str) -> None:
    """By one rank at least; the others may hear of it from that one."""
    assert all(error.type in ("WireError", "CommunicationError") for error in errors)
    assert any(error.type == "WireError" and refused in error.text for error in errors)
    assert all(error.seconds < 5 for error in errors)


@pytest.mark.parametrize("codec", ["lm4", "none"])
def test_a_counter_that_cannot_be_is_refused(three_ranks: World, codec: str) -> None:
    for name, errors in by_case(three_ranks.run(spoil, COUNTERS, codec)):
        expect_refusal(errors, f"corrupted counter of rank 1: expected {name.split()[0]} from ")


def test_a_spoiled_slot_is_refused(three_ranks: World) -> None:
    for _, errors in by_case(three_ranks.run(spoil, SLOT_BYTES, "lm4")):
        expect_refusal(errors, "corrupted wire from rank 1")


@pytest.mark.parametrize("codec", ["lm4", "none"])
def test_a_spoiled_page_ends_all_ranks(three_ranks: World, codec: str) -> None:
    for _, errors in by_case(three_ranks.run(spoil, PAGES, codec)):
        for error in errors:
            assert error.type in ("WireError", "CommunicationError"), error.text
            assert error.seconds < 5


def spoil_sleeper(rank: int, world_size: int) -> None:
    group = group_over("ring", range(3), LM4_SLOT, TIMEOUT_S)
    expected = reduce(group, "lm4")
    for value in (b"\xff" * 4, struct.pack("I", 2), struct.pack("I", 77)):
        if rank == 1:
            at("before publish", 2, partial(write, ring_of(group), ASLEEP_ON, value))
        assert torch.equal(reduce(group, "lm4"), expected)


def test_a_wrong_sleeper_changes_no_result(three_ranks: World) -> None:
    """At worst it is not woken, and looks by itself a little later."""
    three_ranks.run(spoil_sleeper)
