"""A log of what would run on which stream of a device, and what it shows.

Every operation has a vector clock, and two that touch the same memory, one of them to write, must
be ordered by events.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

Clock = dict[str, int]


class Span(NamedTuple):
    """Bytes of a storage."""

    storage: int
    start: int
    stop: int

    def overlaps(self, other: Span) -> bool:
        same = self.storage == other.storage
        return same and self.start < other.stop and other.start < self.stop


class Operation(NamedTuple):
    name: str
    stream: str
    clock: Clock
    reads: list[Span]
    writes: list[Span]

    def before(self, other: Operation) -> bool:
        return other.clock.get(self.stream, 0) >= self.clock[self.stream]

    def conflicts(self, other: Operation) -> bool:
        return any(
            a.overlaps(b)
            for some, others in (
                (self.writes, other.reads),
                (self.writes, other.writes),
                (self.reads, other.writes),
            )
            for a in some
            for b in others
        )


class Recorder:
    """The log. A thread's current stream is `main` unless it says otherwise."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.kept: set[int] = set()
        self.owners: dict[int, str] = {}  # the stream that each storage was made on
        self.early_futures: list[str] = []
        self.host_waits: list[str] = []
        self._clocks: dict[str, Clock] = {}
        self._here = threading.local()
        self._lock = threading.Lock()
        self._alive: list[Any] = []  # no memory is used twice while it is recorded

    @property
    def current(self) -> str:
        return getattr(self._here, "stream", "main")

    def switch(self, stream: str) -> None:
        self._here.stream = stream

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before = self.current
        self.switch(stream)
        try:
            yield
        finally:
            self.switch(before)

    def span(self, t: Tensor) -> Span:
        self._alive.append(t)
        size = t.element_size()
        start = t.storage_offset() * size
        last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
        stop = start + (last + 1) * size if t.numel() else start
        return Span(t.untyped_storage()._cdata, start, stop)

    def make(self, t: Tensor) -> None:
        """The tensor is new, and belongs to the current stream."""
        self.owners.setdefault(self.span(t).storage, self.current)

    def run(
        self,
        name: str,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
        stream: str | None = None,
    ) -> None:
        stream = stream or self.current
        spans = [[self.span(t) for t in tensors] for tensors in (reads, writes)]
        with self._lock:
            clock = self._clocks.setdefault(stream, {})
            clock[stream] = clock.get(stream, 0) + 1
            self.operations.append(Operation(name, stream, dict(clock), *spans))

    def event(self, stream: str | None = None) -> Clock:
        with self._lock:
            return dict(self._clocks.get(stream or self.current, {}))

    def join(self, stream: str, clock: Clock) -> None:
        with self._lock:
            mine = self._clocks.setdefault(stream, {})
            for other, count in clock.items():
                mine[other] = max(mine.get(other, 0), count)

    def complete(self, clock: Clock, t: Tensor) -> None:
        """Notes what is done to a future's tensor but not before the event of its result."""
        storage = self.span(t).storage
        self.early_futures += [
            op.name
            for op in self.operations
            if any(span.storage == storage for span in (*op.reads, *op.writes))
            and clock.get(op.stream, 0) < op.clock[op.stream]
        ]

    def wait_on_host(self, name: str) -> None:
        """The user's thread waits for the device; the engine's may."""
        if threading.current_thread().name != "zcomm-engine":
            self.host_waits.append(name)

    # What the log shows.

    def races(self) -> list[str]:
        """Pairs of operations that touch the same memory in no order."""
        found = []
        for i, op in enumerate(self.operations):
            for other in self.operations[:i]:
                if op.stream == other.stream or other.before(op) or op.before(other):
                    continue
                if op.conflicts(other):
                    found.append(f"{other.name} on {other.stream}, {op.name} on {op.stream}")
        return found

    def not_kept(self) -> list[str]:
        """What the side stream does to memory of another stream that nobody keeps for it."""
        return [
            f"{op.name} uses memory of {self.owners[span.storage]}"
            for op in self.operations
            if op.stream == "side"
            for span in (*op.reads, *op.writes)
            if span.start < span.stop
            and self.owners.get(span.storage, "side") != "side"
            and span.storage not in self.kept
        ]

    def names(self, stream: str) -> list[str]:
        return [op.name for op in self.operations if op.stream == stream]


class Report:
    """What the log of a rank shows, for another process."""

    def __init__(self, recorder: Recorder) -> None:
        self.races, self.not_kept = sorted(set(recorder.races())), set(recorder.not_kept())
        self.early_futures, self.host_waits = recorder.early_futures, recorder.host_waits
        self.side, self.hops = recorder.names("side"), len(recorder.names("net"))

    def expect_order(self, hops: int) -> None:
        assert not self.races, self.races
        assert not self.not_kept, self.not_kept
        assert not self.early_futures, self.early_futures
        assert self.hops >= hops
        assert self.side.count("encode") >= hops
        assert "decode" in self.side
