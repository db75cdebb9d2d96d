"""Job: what a caller hands to the engine, and where its data lies."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zcomm.codecs.scattered import ScatteredLayout
from zcomm.engine.streams import Event, Streams
from zcomm.kernels import cpu
from zcomm.kernels.base import GRAD_DTYPES
from zcomm.sharding.chunks import Chunk, Chunks
from zcomm.sharding.residual_store import BoundFeedback
from zcomm.torch_private import foreach


class Collective(NamedTuple):
    """Whether the ranks' tensors are summed, and whether every rank gets all of the result."""

    reduce: bool
    gather: bool


ALL_REDUCE = Collective(reduce=True, gather=True)
REDUCE_SCATTER = Collective(reduce=True, gather=False)
ALL_GATHER = Collective(reduce=False, gather=True)


class Encoding(NamedTuple):
    """How a job's bytes are made. `feedback` has the residuals of each chunk."""

    prescale: float = 1.0
    verify: bool = True
    feedback: BoundFeedback | None = None


_PLAIN = Encoding()


class Destination(NamedTuple):
    """A layout, and the tensor it decodes into."""

    layout: Any  # a Layout or a RawLayout
    tensor: Tensor


class Span(NamedTuple):
    """Memory that offsets count from, and what it holds."""

    address: int
    dtype: torch.dtype

    @property
    def place(self) -> tuple[int, int]:
        """For native code."""
        return self.address, GRAD_DTYPES[self.dtype]


class Owned(Protocol):
    """What this rank owns: for native code in one strip, and, if frames are decoded to it and
    encoded from it, in parts, one for each chunk."""

    @property
    def own_strip(self) -> Any: ...
    @property
    def own_parts(self) -> Any: ...


class Memory(NamedTuple):
    """Where the numbers of a whole job lie, for a collective that needs no chunks.

    `strips` is what each rank owns, in `source` and in `target`; `owned` is what this rank owns
    once more, in `own`: there its sums go, or there it comes from.
    """

    strips: Any
    source: Span
    target: Span
    owned: Owned
    own: Span
    accumulate: bool = False


class JobData:
    """Two flat tensors: `source` is encoded, `target` receives. They may be the same memory.

    A reduce-scatter packs its sums into the target; an all-gather finds what this rank owns packed
    in the source. Subclasses keep their data elsewhere. Where decoding straight into place is not
    possible, a method returns None and the engine passes packed values to its store_ counterpart.
    """

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self.source, self.target = source, target
        self.itemsize = target.element_size()

    def tensors(self) -> tuple[Tensor, ...]:
        """The caller's memory that the engine reads and writes."""
        return self.source, self.target

    def memory(self, chunks: Chunks, collective: Collective) -> Memory | None:
        """The same for all chunks together; None if the data must pass through the methods below.

        A collective with one hop has packed what this rank owns.
        """
        source, target = _span(self.source), _span(self.target)
        own = target if collective.reduce else source
        return Memory(chunks.strips, source, target, chunks, own)

    def owned(self, index: int, chunk: Chunk) -> Tensor | ScatteredLayout | None:
        """What this rank owns of a chunk. None: load() fills a buffer with it."""
        return _own_part(self.source, chunk)

    def load(self, index: int, chunk: Chunk, values: Tensor) -> None:
        values.copy_(_own_part(self.source, chunk))

    def sum_destination(self, index: int, chunk: Chunk) -> Destination | None:
        part = _own_part(self.target, chunk)
        return Destination(chunk.own, part) if part.dtype is chunk.sum_dtype else None

    def store_sum(self, index: int, chunk: Chunk, values: Tensor) -> None:
        _own_part(self.target, chunk).copy_(values)

    def destination(self, index: int, chunk: Chunk) -> Destination | ScatteredLayout | None:
        """Where all ranks' values go; a ScatteredLayout takes those of the other ranks only."""
        same = self.target.dtype is chunk.sum_dtype
        return Destination(chunk.wire, self.target) if same else None

    def store(self, index: int, chunk: Chunk, values: Tensor) -> None:
        """Kernels write fp32; a bf16 or fp16 target is filled from there."""
        foreach.copy_(*_segments(chunk.wire, self.target, values))


class SinkLayouts(list[Any]):
    """Where the sums of each chunk go in a sink's flat tensor."""

    @cached_property
    def own_strip(self) -> Any:
        return cpu.strips([[(s.offset, s.numel) for layout in self for s in layout.segments]])

    @cached_property
    def own_parts(self) -> Any:
        return cpu.owned_parts((layout, 0) for layout in self)


class SinkData(JobData):
    """A reduce-scatter whose sums go, chunk by chunk, where `layouts` say; or are added there."""

    def __init__(
        self, source: Tensor, target: Tensor, layouts: SinkLayouts, accumulate: bool
    ) -> None:
        super().__init__(source, target)
        self._layouts, self._accumulate = layouts, accumulate

    def memory(self, chunks: Chunks, collective: Collective) -> Memory | None:
        source, target = _span(self.source), _span(self.target)
        return Memory(chunks.strips, source, target, self._layouts, target, self._accumulate)

    def sum_destination(self, index: int, chunk: Chunk) -> Destination | None:
        return None if self._accumulate else Destination(self._layouts[index], self.target)

    def store_sum(self, index: int, chunk: Chunk, values: Tensor) -> None:
        foreach.add_(*_segments(self._layouts[index], self.target, values))

    def copy_source(self, index: int, chunk: Chunk) -> None:
        """In a world of one rank the source is the sum."""
        segments = chunk.wire.segments
        parts = [self.source[s.offset : s.offset + s.numel] for s in segments]
        into, _ = _segments(self._layouts[index], self.target, self.target[: chunk.numel])
        for to, values in zip(into, parts):
            to.add_(values) if self._accumulate else to.copy_(values)


def _span(flat: Tensor) -> Span:
    return Span(flat.data_ptr(), flat.dtype)


def _own_part(flat: Tensor, chunk: Chunk) -> Tensor:
    """This rank's part of a chunk, in a tensor that packs everything this rank owns."""
    return flat[chunk.shard_offset : chunk.shard_offset + chunk.own.numel]


def _segments(layout: Any, flat: Tensor, packed: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """A layout's segments in a flat tensor, and in one that packs them."""
    segments = layout.segments
    views = [flat[s.offset : s.offset + s.numel] for s in segments]
    return views, list(torch.split(packed, [s.numel for s in segments]))


@dataclass(eq=False)
class Job:
    """One collective over one list of chunks.

    `what` names it in errors; `signature` must be the same on all ranks. `finish` is called with
    the error, or None, before anyone learns that the job is complete. On a device a job is complete
    once all of it is enqueued: `ready` are the events before its first step, `done` is the one
    after its last. `awaited`: the caller does nothing but wait for it.
    """

    what: str
    collective: Collective
    chunks: Chunks
    data: JobData
    encoding: Encoding = _PLAIN
    signature: str = ""
    finish: Callable[[BaseException | None], None] | None = None
    awaited: bool = False
    begun: Any = field(default=None, init=False)  # what its caller's thread has begun of it
    started_at: float = field(default=0.0, init=False)
    error: BaseException | None = field(default=None, init=False)
    streams: Streams | None = field(default=None, init=False)
    ready: Sequence[Event] = field(default=(), init=False)
    done: Event | None = field(default=None, init=False)
    _completed: threading.Event = field(default_factory=threading.Event, init=False)

    def place(self, hop: str, index: int) -> str:
        """Where errors of a chunk happen."""
        return f"{self.what}, {hop} of chunk {index + 1} of {len(self.chunks)}"

    def complete(self) -> None:
        if self.finish is not None:
            self.finish(None)
        self._completed.set()

    def fail(self, error: BaseException) -> None:
        """Whatever happens, those who wait are told."""
        self.error = error
        with suppress(Exception):
            if self.finish is not None:
                self.finish(error)
        self._completed.set()

    def completed(self) -> bool:
        """Whether it is complete, on the device too."""
        return self._completed.is_set() and (self.done is None or self.done.query())

    def wait(self) -> None:
        """Until it is complete, with or without an error; the current stream waits for it too."""
        self._completed.wait()
        if self.streams is not None and self.done is not None:
            self.streams.wait_current(self.done)


def signature_number(signature: str) -> int:
    """What ranks compare: a hash of 64 bits."""
    return int.from_bytes(hashlib.blake2b(signature.encode(), digest_size=8).digest(), "little")


class Marker(threading.Event):
    """Submitted in place of a job: completes once the device has finished all jobs before it."""

    what = "what the device found"

    def complete(self) -> None:
        self.set()

    def fail(self, error: BaseException) -> None:
        self.set()
