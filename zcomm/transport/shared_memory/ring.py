"""The ring: how the ranks of a host take turns on the segments that they share.

A segment is a page of control and then slots. Chunk i of all jobs goes through slot i mod SLOTS of
every rank. csrc/shm/ring.h has the layout of the page and the rules of its counters; this is its
Python face, which turns what it sees into errors.
"""

import ctypes
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm import kernels
from zcomm.kernels.cpu import CpuKernels
from zcomm.sharding.chunks import ChunkSize
from zcomm.transport.handshake import Caller
from zcomm.transport.shared_memory.segment import NoSharedMemory
from zcomm.transport.shared_memory.sharing import ALONE, SharedMemory, share

SLOTS = 4
# As csrc/shm/ring.h has them.
_CONTROL_NBYTES, _MOST_RANKS = 4096, 128
# All slots of all ranks, as far as the least allows: they should stay in the cache.
_TOTAL_NBYTES = 8 << 20
# With two hops the network is slower than any memory: room for the chunks that suit it.
_HOPS_SLOT_NBYTES = 8 << 20
# Room for any row of pieces (65,536 elements, at most 4 bytes each) and its headers.
_LEAST_SLOT_NBYTES = (256 + 16) << 10


class Counter(IntEnum):
    """How far a rank has come, as csrc/shm/ring.h numbers it."""

    PUBLISHED = 0
    REDUCED = 1
    COLLECTED = 2


class State(IntEnum):
    """What a rank sees of the others, as csrc/shm/ring.h numbers it."""

    REACHED = 0
    NOT_YET = 1
    DIED = 2
    GAVE_UP = 3
    BROKEN = 4
    OTHER_JOB = 5
    INTERRUPTED = 6


class RingError(RuntimeError):
    """Ranks will not meet in the ring. `rank` is the one at fault, or the first that is late."""

    def __init__(self, state: State, rank: int, text: str) -> None:
        super().__init__(text)
        self.state, self.rank = state, rank


def slot_nbytes(world_size: int) -> int:
    """The bytes of a slot, for this many ranks."""
    return max(_TOTAL_NBYTES // (SLOTS * world_size) // 4096 * 4096, _LEAST_SLOT_NBYTES)


def segment_nbytes(world_size: int) -> int:
    """The memory that each rank shares."""
    return _CONTROL_NBYTES + SLOTS * slot_nbytes(world_size)


def chunk_size(world_size: int) -> ChunkSize:
    """What a chunk may hold: of bodies as much as a slot has room for, next to their headers.

    And few elements: the caller's memory that a chunk is read from and written to should stay in
    the L2 cache from its first step to its last.
    """
    numel = world_size << 16
    return ChunkSize(numel, slot_nbytes(world_size) - 64 * world_size)


class Ring:
    """The ring of some ranks of a group that are all on one host. Ranks are those of the group.

    One thread at a time uses it: the engine's or, under the engine's lock, a caller's. Every wait
    ends at `deadline_s`.
    """

    def __init__(
        self,
        memory: SharedMemory,
        members: Sequence[int],
        rank: int,
        nbytes: int,
        chunk_size: ChunkSize,
        deadline_s: float,
    ) -> None:
        from zcomm import _core

        self.rank, self.members, self.slot_nbytes = rank, tuple(members), nbytes
        self.chunk_size, self.deadline_s = chunk_size, deadline_s
        self._memory = memory
        peers = {r: (peer.address, peer.life_fd) for r, peer in memory.peers.items()}
        ranks = [peers.get(r, (memory.segment.address, -1)) for r in members]
        self.native: Any = _core.Ring(self.members.index(rank), ranks, SLOTS, nbytes)
        self._slots = {
            r: [_bytes_at(self.native.slot(at, i), nbytes) for i in range(SLOTS)]
            for at, r in enumerate(members)
        }

    def slot(self, rank: int, chunk: int) -> Tensor:
        """The bytes of a rank's slot; only this rank's own may be written."""
        return self._slots[rank][chunk % SLOTS]

    def has_free_slot(self, timeout_s: float = 0.0) -> bool:
        """Whether take() would not wait, once the time is up."""
        return self._seen(self.native.wait_free(timeout_s, 0))

    def has_all(self, counter: Counter, chunk: int, timeout_s: float = 0.0) -> bool:
        """Whether all ranks are past a chunk, once the time is up."""
        return self._seen(self.native.wait(counter, chunk, timeout_s, 0))

    def _seen(self, seen: tuple[int, ...] | None) -> bool:
        if seen is not None and seen[0] == State.NOT_YET:
            return False
        self.expect(seen)
        return True

    def take(self, spins: int = 0) -> int:
        """The number of the next chunk, once its slot is free."""
        self.expect(self.native.wait_free(self.deadline_s, spins))
        number: int = self.native.take()
        return number

    def wait(
        self, counter: Counter, chunk: int, spins: int = 0, deadline_s: float | None = None
    ) -> None:
        """Until all ranks have come past a chunk."""
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        self.expect(self.native.wait(counter, chunk, deadline_s, spins))

    def publish(self, chunk: int, signature: int) -> None:
        """This rank's slot of a chunk is written."""
        self.native.publish(chunk, signature)

    def done(self, counter: Counter, chunk: int) -> None:
        """This rank has come past a chunk."""
        self.native.done(counter, chunk)

    def expect(self, seen: tuple[int, ...] | None) -> None:
        """Raises what stands in the way, if anything does."""
        if seen is None:
            return
        number, at, counter, got, least, most = seen
        state, name = State(number), Counter(counter).name.lower()
        text = {
            State.NOT_YET: f"no answer for {self.deadline_s:g} s",
            State.DIED: "its process has ended",
            State.GAVE_UP: "it gave up",
            State.BROKEN: f"expected {name} from {least} to {most}, got {got}",
            State.OTHER_JOB: "another call",
            State.INTERRUPTED: "this rank's engine was stopped",
        }
        raise RingError(state, self.members[at], text[state])

    def give_up(self) -> None:
        """Tells the others that this rank does nothing more."""
        self.native.give_up()

    @property
    def has_pidfds(self) -> bool:
        """Whether the kernel says when a peer's process ends; else its connection does."""
        return all(peer.has_pidfd for peer in self._memory.peers.values())

    def interrupt(self) -> None:
        """From another thread: ends a wait under way, and later ones."""
        self.native.interrupt()

    def nbytes(self) -> int:
        """The memory of this rank's own segment."""
        return self._memory.segment.nbytes

    def close(self) -> None:
        """Unmaps everything. Nobody may use the ring or its slots any more."""
        self._slots.clear()
        self._memory.close()


class RingWork:
    """A hop through the ring, as a work of torch: done when all ranks are past a chunk."""

    def __init__(self, ring: Ring, counter: Counter, chunk: int) -> None:
        self._ring, self._counter, self._chunk = ring, counter, chunk
        self._deadline = monotonic() + ring.deadline_s
        self._error: RingError | None = None

    def is_completed(self) -> bool:
        """Also when it failed: wait() raises that."""
        return self._look(0.0)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Without a timeout, until it is completed."""
        rest_s = self._ring.deadline_s if timeout is None else timeout.total_seconds()
        if self._look(rest_s) and self._error is not None:
            raise self._error

    def _look(self, timeout_s: float) -> bool:
        if self._error is None:
            try:
                if self._ring.has_all(self._counter, self._chunk, timeout_s):
                    return True
                if monotonic() > self._deadline:
                    self._ring.wait(self._counter, self._chunk, deadline_s=0.0)
            except RingError as error:
                self._error = error
        return self._error is not None


def make_ring(
    caller: Caller, deadline_s: float, members: Sequence[int] | None = None
) -> Ring | NoSharedMemory:
    """The ring of a group, or of some of its ranks, or why there is none.

    All ranks of the group call it. Members, all of which give the same, are those on one host that
    exchange the hops inside it.
    """
    rank, world_size = dist.get_rank(caller.group), dist.get_world_size(caller.group)
    ring = range(world_size) if members is None else sorted(members)
    problem = _own_problem()
    if len(ring) > _MOST_RANKS:  # ranks of other hosts are asked, too, and may have fewer
        problem = f"expected {_MOST_RANKS} ranks on a host at most, got {len(ring)}"
    nbytes, chunk = slot_nbytes(world_size), chunk_size(world_size)
    if members is not None:
        nbytes, chunk = _HOPS_SLOT_NBYTES, hops_chunk_size(world_size)
    memory = share(_CONTROL_NBYTES + SLOTS * nbytes, caller, problem)
    if isinstance(memory, NoSharedMemory):
        return memory
    strangers = memory.peers.keys() - set(ring)
    if len(memory.peers) - len(strangers) < len(ring) - 1:
        memory.close()
        return NoSharedMemory("the ranks of the group are on several hosts")
    if len(ring) == 1:
        memory.close()
        return ALONE
    for stranger in strangers:
        memory.peers.pop(stranger).close()
    return Ring(memory, ring, rank, nbytes, chunk, deadline_s)


def hops_chunk_size(world_size: int) -> ChunkSize:
    """How much a chunk with two hops may hold, also on hosts without a ring. A slot has the frames
    inside a host, and at most two thirds as many others."""
    return ChunkSize(_HOPS_SLOT_NBYTES, _HOPS_SLOT_NBYTES * 3 // 5 - 64 * world_size)


def _own_problem() -> str:
    """Why this rank must not share memory; empty if it may.

    Where to take plain jobs through the ring depends on the kernels, and has to be the same for all
    ranks.
    """
    used = kernels.select(torch.device("cpu"))
    return "" if isinstance(used, CpuKernels) else f"expected kernels 'cpu', got {used.name!r}"


def _bytes_at(address: int, nbytes: int) -> Tensor:
    """Memory as a tensor, which does not keep it alive."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
