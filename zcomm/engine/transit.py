"""Transit: one chunk on its way, and the stages it passes through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed import Work

from zcomm.engine.buffers import AnySlot, Frames, TwoSlots
from zcomm.engine.job import Job
from zcomm.sharding.chunks import Chunk, Hops
from zcomm.sharding.residual_store import Hop
from zcomm.transport.channels import Channel
from zcomm.transport.shared_memory.ring import RingWork


class Stage(NamedTuple):
    """A hop: its name for errors, its channel, what makes its bytes ready, and what starts it."""

    hop: str
    channel: Channel
    prepare: Callable[[Transit], object]
    start: Callable[[Transit], Work | RingWork]


@dataclass(eq=False)
class Transit:
    """A chunk in flight: its slot, the stages of its job, and which of them it is in."""

    job: Job
    index: int
    slot: AnySlot
    stages: tuple[Stage, ...]
    stage: int = 0
    hop: str = ""  # the last one sent
    work: Work | RingWork | None = None
    sent_at: float = 0.0

    @property
    def chunk(self) -> Chunk:
        return self.job.chunks[self.index]

    @property
    def verify(self) -> bool:
        return self.job.encoding.verify

    @property
    def channel(self) -> Channel:
        return self.stages[self.stage].channel

    @property
    def in_last_stage(self) -> bool:
        return self.stage == len(self.stages) - 1

    def will_use(self, channel: Channel) -> bool:
        """Whether a later stage goes over it."""
        return any(later.channel is channel for later in self.stages[self.stage + 1 :])

    @property
    def hops(self) -> Hops:
        assert self.chunk.hops is not None
        return self.chunk.hops

    @property
    def whole(self) -> Frames:
        """The frames of all owners."""
        return Frames(self.chunk, self.slot)

    @property
    def local(self) -> Frames:
        """The frames for the ranks of this host."""
        inside = self.slot.inside if isinstance(self.slot, TwoSlots) else self.slot
        return Frames(self.hops.local, inside)

    @property
    def coded(self) -> Frames:
        """The frames of the encoding with residuals; between hosts, the last ones of the whole."""
        coded = self.chunk.coded
        if isinstance(self.slot, TwoSlots):
            return Frames(coded, self.slot.between)
        start = self.chunk.wire.wire_nbytes - coded.wire.wire_nbytes
        return Frames(coded, self.slot, start)

    @property
    def sent(self) -> Hop | None:
        feedback = self.job.encoding.feedback
        return feedback[self.index].sent if feedback else None

    @property
    def owned(self) -> Hop | None:
        feedback = self.job.encoding.feedback
        return feedback[self.index].owned if feedback else None

    def __str__(self) -> str:
        return self.job.place(self.hop, self.index)
