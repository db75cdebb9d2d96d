"""The ring: how the ranks of a host take turns on the segments that they share.

A segment is a page of control and then slots. Chunk i of all jobs goes through slot i mod SLOTS of
every rank. csrc/shm/ring.h has the layout of the page and the rules of its counters; this is its
Python face, which turns what it sees into errors.
"""

import ctypes
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm.transport.handshake import Caller
from zcomm.transport.shared_memory.segment import NoSharedMemory
from zcomm.transport.shared_memory.sharing import SharedMemory, share

SLOTS = 4
_CONTROL_NBYTES = 4096
# All slots of all ranks, as far as the least allows: they should stay in the cache.
_TOTAL_NBYTES = 8 << 20
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


def chunk_nbytes(world_size: int) -> int:
    """The bodies that a slot has room for, next to their headers."""
    return slot_nbytes(world_size) - 64 * world_size


class Ring:
    """The ring of a group all of whose ranks are on one host.

    One thread uses it. Every wait ends at `deadline_s`.
    """

    def __init__(self, memory: SharedMemory, rank: int, world_size: int, deadline_s: float) -> None:
        from zcomm import _core

        nbytes = slot_nbytes(world_size)
        self.rank, self.world_size, self.slot_nbytes = rank, world_size, nbytes
        self.chunk_nbytes, self.deadline_s = chunk_nbytes(world_size), deadline_s
        self._memory = memory
        peers = {r: (peer.address, peer.life_fd) for r, peer in memory.peers.items()}
        ranks = [peers.get(r, (memory.segment.address, -1)) for r in range(world_size)]
        self.native: Any = _core.Ring(rank, ranks, SLOTS, nbytes)
        self._slots = [
            [_bytes_at(self.native.slot(r, i), nbytes) for i in range(SLOTS)]
            for r in range(world_size)
        ]

    def slot(self, rank: int, chunk: int) -> Tensor:
        """The bytes of a rank's slot; only this rank's own may be written."""
        return self._slots[rank][chunk % SLOTS]

    def take(self, spins: int = 0) -> int:
        """The number of the next chunk, once its slot is free."""
        self.expect(self.native.wait_free(self.deadline_s, spins))
        number: int = self.native.take()
        return number

    def wait(self, counter: Counter, chunk: int, spins: int = 0) -> None:
        """Until all ranks have come past a chunk."""
        self.expect(self.native.wait(counter, chunk, self.deadline_s, spins))

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
        number, rank, counter, got, least, most = seen
        state, name = State(number), Counter(counter).name.lower()
        text = {
            State.NOT_YET: f"no answer for {self.deadline_s:g} s",
            State.DIED: "its process has ended",
            State.GAVE_UP: "it gave up",
            State.BROKEN: f"expected {name} from {least} to {most}, got {got}",
            State.OTHER_JOB: "another call",
        }
        raise RingError(state, rank, text[state])

    def give_up(self) -> None:
        """Tells the others that this rank does nothing more."""
        self.native.give_up()

    @property
    def has_pidfds(self) -> bool:
        """Whether the kernel says when a peer's process ends; else its connection does."""
        return all(peer.has_pidfd for peer in self._memory.peers.values())

    def nbytes(self) -> int:
        """The memory of this rank's own segment."""
        return self._memory.segment.nbytes

    def close(self) -> None:
        """Unmaps everything. Nobody may use the ring or its slots any more."""
        self._slots.clear()
        self._memory.close()


def make_ring(caller: Caller, deadline_s: float) -> Ring | NoSharedMemory:
    """The ring of a group, or why there is none. All ranks of the group call it."""
    rank, world_size = dist.get_rank(caller.group), dist.get_world_size(caller.group)
    memory = share(segment_nbytes(world_size), caller)
    if isinstance(memory, NoSharedMemory):
        return memory
    if len(memory.peers) < world_size - 1:
        memory.close()
        return NoSharedMemory("the ranks of the group are on several hosts")
    return Ring(memory, rank, world_size, deadline_s)


def _bytes_at(address: int, nbytes: int) -> Tensor:
    """Memory as a tensor, which does not keep it alive."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
