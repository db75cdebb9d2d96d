"""Frames: a chunk's bytes in the memory of a slot, and the all-to-all of each hop."""

from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zcomm.sharding.chunks import Chunk, Hops
from zcomm.transport.shared_memory.ring import Ring


class AnySlot(Protocol):
    """Where a chunk's bytes lie: this rank's wire, and what it gets from the others."""

    @property
    def wire(self) -> Tensor: ...

    def received(self, frames: "Frames", /) -> list[Tensor]:
        """This rank's frame from every other rank, in the order of the group."""

    def gathered(self, frames: "Frames", own: bool, /) -> Tensor | list[Tensor]:
        """Every rank's frame, with this rank's own or without it: one wire, or where they lie."""


class Slot:
    """The two buffers of one chunk under way. They grow to the largest chunk and stay.

    The hops inside a host and between hosts use the same memory, one after the other.
    """

    def __init__(self, device: torch.device) -> None:
        self.wire, self.rows = (torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2))

    def reserve(self, chunk: Chunk, reduce: bool) -> None:
        wire, rows = chunk.slot_nbytes(reduce)
        self.wire, self.rows = grown(self.wire, wire), grown(self.rows, rows)

    def nbytes(self) -> int:
        return self.wire.nbytes + self.rows.nbytes

    def received(self, frames: "Frames") -> list[Tensor]:
        rows, nbytes = frames.rows, frames.chunk.own_nbytes
        return [rows[i * nbytes : (i + 1) * nbytes] for i in range(len(frames.chunk.sources) - 1)]

    def gathered(self, frames: "Frames", own: bool) -> Tensor | list[Tensor]:
        return frames.wire if own else frames.others


class SharedSlot:
    """A chunk's slots in the memory that the ranks of a host share: nothing is copied there.

    This rank writes its own slot, and reads its peers' where they lie.
    """

    def __init__(self, ring: Ring, number: int) -> None:
        self._ring, self.number = ring, number
        self.wire = ring.slot(ring.rank, number)

    def received(self, frames: "Frames") -> list[Tensor]:
        nbytes, starts = frames.chunk.own_nbytes, frames.chunk.starts_at_peers
        slots = (self._ring.slot(r, self.number) for r in starts)
        return [slot[start : start + nbytes] for slot, start in zip(slots, starts.values())]

    def gathered(self, frames: "Frames", own: bool) -> Tensor | list[Tensor]:
        # The last one of each rank's wire.
        chunk, end = frames.chunk, frames.chunk.wire.wire_nbytes
        sizes = zip(chunk.senders[:-1], chunk.wire.frame_nbytes)
        others = [self._ring.slot(r, self.number)[end - nbytes : end] for r, nbytes in sizes]
        return [*others, frames.own] if own else others


class TwoSlots:
    """A chunk with two hops: inside the host in shared memory, between hosts in a slot.

    Behind the frames for the ranks of the host, the shared slot has room for a column: the frames
    that came from the other hosts, for the ranks of this one.
    """

    def __init__(self, ring: Ring, number: int, between: Slot, hops: Hops) -> None:
        self.inside, self.between = SharedSlot(ring, number), between
        self._ring, self._hops = ring, hops

    @property
    def wire(self) -> Tensor:
        return self.between.wire

    def received(self, frames: "Frames") -> list[Tensor]:
        return self.between.received(frames)

    def share_column(self, column: Tensor) -> None:
        """Copies this rank's column to where its neighbours look for it."""
        self._column(self._ring.rank, column.numel()).copy_(column)

    def gathered(self, frames: "Frames", own: bool) -> Tensor | list[Tensor]:
        sizes = iter(frames.chunk.wire.frame_nbytes)
        found: list[Tensor] = []
        for r, nbytes in self._hops.columns.items():
            mine = r == self._ring.rank
            column = self.between.wire[:nbytes] if mine else self._column(r, nbytes)
            found += torch.split(column, list(islice(sizes, self._hops.column_ranks[r])))
        return found if own else found[:-1]

    def _column(self, rank: int, nbytes: int) -> Tensor:
        start = self._hops.column_start
        return self._ring.slot(rank, self.inside.number)[start : start + nbytes]


class Frames(NamedTuple):
    """A chunk's views of a slot's memory; its wire begins at `start`."""

    chunk: Chunk
    slot: AnySlot
    start: int = 0

    @property
    def wire(self) -> Tensor:
        return self.slot.wire[self.start : self.start + self.chunk.wire.wire_nbytes]

    @property
    def others(self) -> Tensor:
        """The frames of the other ranks."""
        return self.slot.wire[self.start : self.start + self.chunk.others_nbytes]

    @property
    def own(self) -> Tensor:
        """This rank's own frame, the last one."""
        return self.wire[self.chunk.others_nbytes :]

    @property
    def rows(self) -> Tensor:
        assert isinstance(self.slot, Slot)
        return self.slot.rows[: self.chunk.rows_nbytes]

    def received(self) -> list[Tensor]:
        """This rank's frame from every rank, in the order of the group."""
        frames = self.slot.received(self)
        frames.insert(self.chunk.index, self.own)
        return frames

    def gathered(self, own: bool) -> Tensor | list[Tensor]:
        return self.slot.gathered(self, own)


class Exchange(NamedTuple):
    """The arguments of an all-to-all: what arrives and what is sent, and each rank's share."""

    out: Tensor
    send: Tensor
    out_splits: list[int]
    send_splits: list[int]


def to_owners(frames: Frames) -> Exchange:
    """The first hop: each of the others' frames goes there, and this rank's come from all."""
    chunk = frames.chunk
    return Exchange(frames.rows, frames.others, chunk.row_splits, chunk.frame_splits)


def to_all(frames: Frames) -> Exchange:
    """The second hop: this rank's own frame, once for each of the others."""
    chunk, sent = frames.chunk, frames.own
    if chunk.needs_rows(reduce=False):
        sent = frames.rows
        sent.view(len(chunk.sources) - 1, chunk.own_nbytes).copy_(frames.own)
    return Exchange(frames.others, sent, chunk.frame_splits, chunk.row_splits)


def grown(buffer: Tensor, nbytes: int) -> Tensor:
    """The buffer, or a larger one in its place; its contents are lost."""
    if buffer.numel() >= nbytes:
        return buffer
    buffer.untyped_storage().resize_(0)  # freed before the new one is made
    return torch.empty(nbytes, dtype=torch.uint8, device=buffer.device)
