"""Frames: a chunk's bytes in the memory of a slot, and the all-to-all of each hop."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zcomm.sharding.chunks import Chunk
from zcomm.transport.shared_memory.ring import Ring


class AnySlot(Protocol):
    """Where a chunk's bytes lie: this rank's wire, and what it gets from the others."""

    wire: Tensor

    def received(self, frames: "Frames", /) -> list[Tensor]:
        """This rank's frame from every other rank, in the order of the group."""

    def gathered(self, frames: "Frames", /) -> Tensor | list[Tensor]:
        """The frames of the other ranks, in the order of the wire: one range, or where they lie."""


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
        return [rows[i * nbytes : (i + 1) * nbytes] for i in range(frames.chunk.wire.peers - 1)]

    def gathered(self, frames: "Frames") -> Tensor | list[Tensor]:
        return frames.others


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

    def gathered(self, frames: "Frames") -> Tensor | list[Tensor]:
        # The last one of each rank's wire.
        chunk, end = frames.chunk, frames.chunk.wire.wire_nbytes
        sizes = zip(chunk.senders[:-1], chunk.wire.frame_nbytes)
        return [self._ring.slot(r, self.number)[end - nbytes : end] for r, nbytes in sizes]


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
        """Every rank's frame, with this rank's own or without it: one wire, or where they lie."""
        frames = self.slot.gathered(self)
        if isinstance(frames, Tensor):
            return self.wire if own else frames
        return [*frames, self.own] if own else frames


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
        sent.view(chunk.wire.peers - 1, chunk.own_nbytes).copy_(frames.own)
    return Exchange(frames.others, sent, chunk.frame_splits, chunk.row_splits)


def grown(buffer: Tensor, nbytes: int) -> Tensor:
    """The buffer, or a larger one in its place; its contents are lost."""
    if buffer.numel() >= nbytes:
        return buffer
    buffer.untyped_storage().resize_(0)  # freed before the new one is made
    return torch.empty(nbytes, dtype=torch.uint8, device=buffer.device)
