"""Jobs, and what of them is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zcomm.chunks import Chunk
from zcomm.feedback import ChunkFeedback, Hop
from zcomm.scattered import ScatteredLayout
from zcomm.streams import Event, Streams
from zcomm.transport import Work


class Direct(NamedTuple):
    """A chunk in its place: what this rank owns, and what the others do."""

    own: ScatteredLayout
    others: ScatteredLayout


class Memory(Protocol):
    """What an all-gather reads and writes, where that is not one flat tensor."""

    itemsize: int  # bytes of an element, if nothing encoded it

    def direct(self, index: int) -> Direct | None:
        """Where a chunk lies, if it can be encoded from and decoded to its place; else None."""
        ...

    def load(self, index: int, values: Tensor) -> None:
        """Overwrites `values` with what this rank owns of a chunk."""
        ...

    def store(self, index: int, values: Tensor) -> None:
        """Takes the decoded values of a chunk, of all ranks, packed."""
        ...


class Job:
    """A flat tensor on its way.

    `source` is encoded, `target` receives; they may be the same memory. With `reduce` the ranks'
    sources are summed, with `gather` every rank receives all of it; one or both. `signature` says
    what must be the same on all ranks. `finish` is called before anyone is told that the job has
    completed, with the error if there is one.

    A reduce-scatter packs its sums in the target, or, with `places`, puts (or adds) those of each
    chunk where that layout says. An all-gather of `memory` has neither source nor target.

    On a device a job has completed when all of it was issued: `ready` are the events before its
    first step, `done` the one after its last.
    """

    def __init__(
        self,
        what: str,
        chunks: Sequence[Chunk],
        source: Tensor | None,
        target: Tensor | None,
        *,
        reduce: bool,
        gather: bool,
        prescale: float = 1.0,
        verify: bool = True,
        feedback: Sequence[ChunkFeedback] | None = None,
        places: Sequence[Any] | None = None,
        accumulate: bool = False,
        memory: Memory | None = None,
        signature: str = "",
        finish: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        self.what, self.chunks = what, chunks
        self.source, self.target = source, target
        self.places, self.accumulate, self.memory = places, accumulate, memory
        self.reduce, self.gather = reduce, gather
        self.prescale, self.verify, self.feedback = prescale, verify, feedback
        self.signature = signature
        self.error: BaseException | None = None
        self.itemsize = memory.itemsize if memory else _itemsize(target)
        self.started = self.decoded = 0  # chunks
        self.check: Check | None = None
        self.streams: Streams | None = None
        self.ready: Sequence[Event] = ()
        self.done: Event | None = None
        self._finish = finish
        self._completed = threading.Event()

    def complete(self) -> None:
        if self._finish is not None:
            self._finish(None)
        self._completed.set()

    def fail(self, error: BaseException) -> None:
        """Whatever happens, those who wait are told."""
        self.error = error
        with suppress(Exception):
            if self._finish is not None:
                self._finish(error)
        self._completed.set()

    def completed(self) -> bool:
        """Whether it has, on the device too."""
        return self._completed.is_set() and (self.done is None or self.done.query())

    def wait(self) -> None:
        """Until it has completed, with or without an error; the current stream follows it."""
        self._completed.wait()
        if self.streams is not None and self.done is not None:
            self.streams.follow(self.done)


class Settling:
    """Submitted in the place of a job: completes when the device is done with all before it."""

    what = "what the device found"

    def __init__(self) -> None:
        self._completed = threading.Event()

    def complete(self) -> None:
        self._completed.set()

    def fail(self, error: BaseException) -> None:
        self._completed.set()

    def wait(self) -> None:
        self._completed.wait()


@dataclass
class Check:
    """The exchange of signatures in front of a job."""

    what: str
    mine: Tensor
    everyone: Tensor
    work: Work

    def __str__(self) -> str:
        return f"{self.what}, comparison of signatures"


class Slot:
    """The two buffers of one chunk under way. They grow to the largest chunk and stay."""

    def __init__(self, device: torch.device) -> None:
        self.wire, self.rows = (torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2))

    def reserve(self, chunk: Chunk, reduce: bool) -> None:
        self.wire = grown(self.wire, chunk.wire.wire_nbytes)
        if chunk.needs_rows(reduce):
            self.rows = grown(self.rows, chunk.rows_nbytes)

    def nbytes(self) -> int:
        return self.wire.nbytes + self.rows.nbytes


@dataclass
class Flight:
    """A chunk under way, and its views of the buffers."""

    job: Job
    index: int
    slot: Slot
    hop: str
    work: Work | None = None

    @property
    def chunk(self) -> Chunk:
        return self.job.chunks[self.index]

    @property
    def wire(self) -> Tensor:
        return self.slot.wire[: self.chunk.wire.wire_nbytes]

    @property
    def others(self) -> Tensor:
        """The frames of the other ranks."""
        return self.slot.wire[: self.chunk.others_nbytes]

    @property
    def own(self) -> Tensor:
        """This rank's own frame, the last one."""
        return self.slot.wire[self.chunk.others_nbytes : self.chunk.wire.wire_nbytes]

    @property
    def rows(self) -> Tensor:
        return self.slot.rows[: self.chunk.rows_nbytes]

    def feedback(self, hop: str) -> Hop | None:
        found: Hop | None = None
        if self.job.feedback:
            found = getattr(self.job.feedback[self.index], hop)
        return found

    def __str__(self) -> str:
        count = len(self.job.chunks)
        return f"{self.job.what}, {self.hop} of chunk {self.index + 1} of {count}"


def _itemsize(target: Tensor | None) -> int:
    assert target is not None
    return target.element_size()


def grown(buffer: Tensor, nbytes: int) -> Tensor:
    """The buffer, or a larger one in its place; what it held is lost."""
    if buffer.numel() >= nbytes:
        return buffer
    buffer.untyped_storage().resize_(0)  # it goes before the new one comes
    return torch.empty(nbytes, dtype=torch.uint8, device=buffer.device)
