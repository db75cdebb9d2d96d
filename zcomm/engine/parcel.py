"""Parcels: what ranks exchange in front of a job. A small job is in them as a whole.

    parcel    the job's signature, and room for some frames; as long for every job

Ranks compare signatures before they read anything else of a job. One that fits takes this exchange
and no other: each rank gets what it has to sum or to decode with the signatures. In an all-reduce
each rank gets everything, and does for all owners what they would do: it sums, encodes and decodes.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zcomm.engine.buffers import Frames
from zcomm.engine.coder import Coder
from zcomm.engine.job import Job, signature_number
from zcomm.engine.transit import Transit
from zcomm.kernels import cpu
from zcomm.sharding.chunks import Chunk

SIGNATURE_NBYTES = 8
# The longest parcel, and the most that a rank sends to all others in front of every job.
_MOST_NBYTES, _MOST_SENT_NBYTES = 4096, 16384


def parcel_nbytes(world_size: int) -> int:
    """At least a signature and nothing else."""
    room = min(_MOST_NBYTES, _MOST_SENT_NBYTES // max(world_size - 1, 1)) // 64 * 64
    return max(room, SIGNATURE_NBYTES)


def is_small(job: Job, world_size: int) -> bool:
    """Whether it fits into parcels; the same on all ranks. The residual of a sum is at its owner,
    and nobody else can encode it, so an all-reduce with feedback takes two hops."""
    if len(job.chunks) != 1 or job.chunks.raw or job.chunks[0].hops is not None:
        return False
    chunk, (reduce, gather) = job.chunks[0], job.collective
    if reduce and gather and job.encoding.feedback is not None:
        return False
    room = parcel_nbytes(world_size) - SIGNATURE_NBYTES
    return (chunk.wire.wire_nbytes if reduce else max(chunk.wire.frame_nbytes)) <= room


class Parcels:
    """Every rank's, in the order of the group: those it sends, or those that arrive."""

    def __init__(self, rank: int, world_size: int, nbytes: int) -> None:
        rows = torch.zeros(world_size, nbytes, dtype=torch.uint8, device="cpu")
        # As numbers of 64 bits, one parcel after the other.
        self.words = rows.view(-1).view(torch.int64)
        self.signatures = rows.view(torch.int64)[:, 0]
        self.frames = rows[:, SIGNATURE_NBYTES:]
        self._place = rank, world_size, self.frames.data_ptr(), nbytes

    @cached_property
    def native(self) -> Any:
        """For native code."""
        return cpu.parcels(*self._place)

    def sign(self, signature: str) -> None:
        self.signatures.fill_(signature_number(signature) - (1 << 63))


class ParcelSlot:
    """The memory of a small job: its own wire, and what has arrived."""

    def __init__(self, chunk: Chunk) -> None:
        self.wire = torch.empty(chunk.wire.wire_nbytes, dtype=torch.uint8, device="cpu")
        self._arrived = torch.empty(0)
        self._results: dict[int, Tensor] = {}

    def send(self, frames: Frames, parcels: Parcels, reduce: bool) -> None:
        """Puts this rank's wire, or without `reduce` its own frame, into every parcel."""
        sent = frames.wire if reduce else frames.own
        parcels.frames[:, : sent.numel()] = sent

    def arrive(self, parcels: Parcels) -> None:
        self._arrived = parcels.frames

    def received(self, frames: Frames) -> list[Tensor]:
        nbytes, starts = frames.chunk.own_nbytes, frames.chunk.starts_at_peers
        return [self._arrived[r, start : start + nbytes] for r, start in starts.items()]

    def gathered(self, frames: Frames, own: bool) -> Tensor | list[Tensor]:
        sizes = zip(frames.chunk.senders[:-1], frames.chunk.wire.frame_nbytes)
        others = [self._results.get(r, self._arrived[r, :nbytes]) for r, nbytes in sizes]
        return [*others, frames.own] if own else others

    def sum_for_others(self, transit: Transit, coder: Coder) -> None:
        """What each other owner would send back: the sum of its frames, encoded."""
        chunk = transit.chunk
        for slot, owner in enumerate(chunk.senders[:-1]):
            layout = chunk.wire.for_peer(slot)
            wires = [
                (self.wire if r == chunk.rank else self._arrived[r])[
                    start : start + layout.wire_nbytes
                ]
                for r, start in chunk.starts_of(owner).items()
            ]
            self._results[owner] = coder.encode_sum_of(transit, layout, wires)
