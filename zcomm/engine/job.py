"""Jobs, and what of them is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from zcomm.codecs.scattered import ScatteredLayout
from zcomm.engine.buffers import Exchange, Frames, Slot
from zcomm.engine.streams import Event, Streams
from zcomm.sharding.chunks import Chunk, Hops
from zcomm.sharding.feedback import ChunkFeedback, Hop
from zcomm.transport.channels import Channel, Work


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
        self.route: Route  # the engine's
        self.started = self.done_chunks = 0
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


class Leg(NamedTuple):
    """A hop of a chunk: its name, its channel, and what makes its bytes ready."""

    hop: str
    channel: Channel
    prepare: Callable[[Flight], Exchange]


class Route(NamedTuple):
    """The legs of a job's chunks, and what is done when they have come to the end."""

    legs: tuple[Leg, ...]
    end: Callable[[Flight], object]

    def channels_after(self, leg: int) -> list[Channel]:
        """Those that a flight on this leg has still to come to."""
        return [later.channel for later in self.legs[leg + 1 :]]


@dataclass
class Flight:
    """A chunk under way: on which leg of its route, and its frames."""

    job: Job
    index: int
    slot: Slot
    leg: int = 0
    hop: str = ""
    work: Work | None = None

    @property
    def chunk(self) -> Chunk:
        return self.job.chunks[self.index]

    @property
    def on_last_leg(self) -> bool:
        return self.leg == len(self.job.route.legs) - 1

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
        return Frames(self.hops.local, self.slot)

    @property
    def coded(self) -> Frames:
        """The frames of the encoding with residuals; between hosts, the last ones of the whole."""
        coded = self.chunk.coded
        start = self.chunk.wire.wire_nbytes - coded.wire.wire_nbytes
        return Frames(coded, self.slot, start)

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
