"""Steps: what is done to a chunk, with two buffers, `wire` and `rows`.

    encode      the flat tensor           -> wire: a frame for each owner
    first hop   the others' frames        -> rows: this rank's frame from each of them
    total       rows and its own frame    -> shard, summed in rank order
    encode_own  the shard                 -> wire (its own frame), copied to rows for the others
    second hop  rows                      -> wire: every owner's frame
    decode      wire                      -> the flat tensor

An all-reduce goes through all of them, a reduce-scatter ends with the sum, an all-gather begins
with encode_own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcomm.chunks import Chunk
from zcomm.faults import Faults
from zcomm.job import Flight, Job, Memory, grown
from zcomm.wire import WireError

# A range of torch.profiler, for 1 us; torch's public record_function takes 20, profiler or not.
Range = torch._C._profiler._RecordFunctionFast
_CPU = torch.device("cpu")
# The place in a wire that a WireError names.
_PLACE = re.compile(r"^wire \d+, (frame|segment) (\d+)")


@dataclass
class Counters:
    """Totals since the engine started."""

    raw_bytes: int = 0
    wire_bytes: int = 0
    encode_s: float = 0.0
    wait_s: float = 0.0
    decode_s: float = 0.0

    @contextmanager
    def time(self, name: str, what: str) -> Iterator[None]:
        """Adds the time that it takes; torch.profiler sees it as zcomm::`what`."""
        started = perf_counter()
        try:
            with Range(f"zcomm::{what}"):
                yield
        finally:
            setattr(self, name, getattr(self, name) + perf_counter() - started)


class Exchange(NamedTuple):
    """The arguments of an all-to-all: what arrives and what is sent, and each rank's share."""

    out: Tensor
    send: Tensor
    out_splits: list[int]
    send_splits: list[int]


class Steps:
    """The steps of one rank. They run one at a time, so they share the shard and the stage.

    With `faults` decoders leave there what they find; without, a refused wire raises at once.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        threads: int | None,
        device: torch.device = _CPU,
        faults: Faults | None = None,
    ) -> None:
        self.counters = Counters()
        self.device = device
        self._rank, self._world_size = rank, world_size
        self._threads = threads
        self._faults = faults
        self._shard = self._stage = torch.empty(0, dtype=torch.uint8, device=device)

    def encode(self, flight: Flight) -> Exchange:
        """Encodes the flat tensor, each owner's frame for that owner."""
        job, chunk = flight.job, flight.chunk
        self.counters.raw_bytes += self._raw_bytes(job, chunk)
        assert job.source is not None
        with self.counters.time("encode_s", "encode"):
            self._encode(flight, "sent", chunk.wire, job.source, flight.wire, job.prescale)
        return Exchange(flight.rows, flight.others, chunk.row_splits, chunk.frame_splits)

    def total(self, flight: Flight) -> Tensor:
        """The sum of this rank's frames: in the target, or on its way to the second hop."""
        job, chunk = flight.job, flight.chunk
        with self.counters.time("decode_s", "decode_sum"):
            if job.places and not job.accumulate:
                assert job.target is not None
                return self._decode_sum(flight, job.places[flight.index], job.target)
            part = None if job.gather or job.places else self._part(job.target, chunk)
            direct = part is not None and part.dtype is chunk.sum_dtype
            shard = part if part is not None and direct else self._shard_buffer(chunk)
            self._decode_sum(flight, chunk.own, shard)
            if job.places:
                _add(job.places[flight.index], shard, job.target)
            elif part is not None and not direct:
                part.copy_(shard)
        return shard

    def _decode_sum(self, flight: Flight, layout: Any, out: Tensor) -> Tensor:
        options = self._options(flight, layout, lambda error: error.wire_index)
        try:
            layout.decode_sum(self._frames(flight), out=out, **options)
        except WireError as error:
            raise self._refused(flight, error.wire_index, error) from error
        return out

    def encode_source(self, flight: Flight) -> Exchange:
        """The first step of an all-gather: the source is what this rank owns."""
        job, chunk = flight.job, flight.chunk
        self.counters.raw_bytes += self._raw_bytes(job, chunk)
        if job.memory is None:
            return self.encode_own(flight, self._part(job.source, chunk))
        direct = job.memory.direct(flight.index)
        with self.counters.time("encode_s", "encode_own"):
            if direct is not None:
                direct.own.encode(flight.own, verify=job.verify, threads=self._threads)
                return self._to_all(flight)
            shard = self._shard_buffer(chunk)
            job.memory.load(flight.index, shard)
        return self.encode_own(flight, shard)

    def encode_own(self, flight: Flight, shard: Tensor) -> Exchange:
        """Encodes what this rank owns, for all ranks and for itself."""
        with self.counters.time("encode_s", "encode_own"):
            self._encode(flight, "owned", flight.chunk.own, shard, flight.own, 1.0)
            return self._to_all(flight)

    def _to_all(self, flight: Flight) -> Exchange:
        """The second hop: this rank's own frame, once for each of the others."""
        chunk, sent = flight.chunk, flight.own
        if chunk.needs_rows(reduce=False):
            sent = flight.rows
            sent.view(self._world_size - 1, chunk.own_nbytes).copy_(flight.own)
        return Exchange(flight.others, sent, chunk.frame_splits, chunk.row_splits)

    def decode(self, flight: Flight) -> None:
        """Decodes all frames, this rank's own among them, into the target."""
        job, chunk = flight.job, flight.chunk
        with self.counters.time("decode_s", "decode"):
            try:
                if job.memory is not None:
                    self._decode_to_memory(flight, job.memory)
                elif job.target is not None and job.target.dtype is chunk.sum_dtype:
                    options = self._frame_options(flight, chunk.wire)
                    chunk.wire.decode(flight.wire, out=job.target, **options)
                else:
                    self._decode_staged(flight)
            except WireError as error:
                raise self._refused(flight, self._refused_sender(flight), error) from error

    def buffer_nbytes(self) -> int:
        return self._shard.nbytes + self._stage.nbytes

    def _encode(
        self, flight: Flight, hop: str, layout: Any, source: Tensor, out: Tensor, prescale: float
    ) -> None:
        feedback = flight.feedback(hop)
        layout.encode(
            source,
            feedback.residuals if feedback else None,
            out=out,
            prescale=prescale,
            verify=flight.job.verify,
            keep_idle=True,
            threads=self._threads,
        )
        if feedback:
            feedback.settle()

    def _frames(self, flight: Flight) -> list[Tensor]:
        """This rank's frame from every rank, in rank order."""
        rows, nbytes = flight.rows, flight.chunk.own_nbytes
        frames = [rows[r * nbytes : (r + 1) * nbytes] for r in range(self._world_size - 1)]
        frames.insert(self._rank, flight.own)
        return frames

    def _decode_staged(self, flight: Flight) -> None:
        """Kernels write fp32; a bf16 or fp16 target is filled from there."""
        target, segments = flight.job.target, flight.chunk.wire.segments
        assert target is not None
        torch._foreach_copy_(
            [target[s.offset : s.offset + s.numel] for s in segments],
            list(torch.split(self._staged(flight), [s.numel for s in segments])),
        )

    def _decode_to_memory(self, flight: Flight, memory: Memory) -> None:
        direct = memory.direct(flight.index)
        if direct is not None:
            options = self._frame_options(flight, direct.others.layout)
            direct.others.decode(flight.others, **options)
        else:
            memory.store(flight.index, self._staged(flight))

    def _staged(self, flight: Flight) -> Tensor:
        """The decoded elements of a chunk, packed."""
        chunk = flight.chunk
        nbytes = chunk.numel * chunk.sum_dtype.itemsize
        self._stage = grown(self._stage, nbytes)
        stage = self._stage[:nbytes].view(chunk.sum_dtype)
        options = self._frame_options(flight, chunk.packed)
        chunk.packed.decode(flight.wire, out=stage, **options)
        return stage

    def _part(self, flat: Tensor | None, chunk: Chunk) -> Tensor:
        """What this rank owns of a chunk, in a tensor of all that it owns."""
        assert flat is not None
        return flat[chunk.shard_offset : chunk.shard_offset + chunk.own.numel]

    def _shard_buffer(self, chunk: Chunk) -> Tensor:
        nbytes = chunk.own.numel * chunk.sum_dtype.itemsize
        self._shard = grown(self._shard, nbytes)
        return self._shard[:nbytes].view(chunk.sum_dtype)

    def _raw_bytes(self, job: Job, chunk: Chunk) -> int:
        """What the same collective would send without a codec, in the tensor's own dtype."""
        others = chunk.numel - chunk.own.numel if job.reduce else 0
        copies = chunk.own.numel * (self._world_size - 1) if job.gather else 0
        return (others + copies) * job.itemsize

    # Wires that are refused.

    def _options(
        self, flight: Flight, layout: Any, sender: Callable[[WireError], int | None]
    ) -> dict[str, Any]:
        """How to decode; with `faults`, where a fault goes and what is said of it later."""
        options: dict[str, Any] = {"verify": flight.job.verify, "threads": self._threads}
        if self._faults is not None:
            place = str(flight)  # of now: its hop changes

            def refused(error: WireError) -> WireError:
                return self._refused(place, sender(error), error)

            options["faults"] = self._faults.take(layout, refused)
        return options

    def _frame_options(self, flight: Flight, layout: Any) -> dict[str, Any]:
        """The same for a wire of frames from all ranks, or all others."""
        return self._options(flight, layout, partial(self._sender_of, layout))

    def _refused(self, place: object, sender: int | None, error: WireError) -> WireError:
        return WireError(
            f"rank {self._rank}: {place}: corrupted wire from rank {sender}: {error}", sender
        )

    def _sender_of(self, layout: Any, error: WireError) -> int:
        """Whose frame it is in which an error names a frame or a segment."""
        peer, found = 0, _PLACE.search(str(error))
        if found is not None:
            index = int(found[2])
            peer = index if found[1] == "frame" else layout.segments[index].peer
        return self._senders()[peer]

    def _senders(self) -> list[int]:
        """The ranks in the order of their frames: this one is the last."""
        return [*(r for r in range(self._world_size) if r != self._rank), self._rank]

    def _refused_sender(self, flight: Flight) -> int | None:
        """Whose frame is refused, one by one."""
        layout = flight.chunk.wire
        frames = torch.split(flight.wire, list(layout.frame_nbytes))
        for slot, sender in enumerate(self._senders()):
            alone = layout.for_peer(slot)
            out = torch.empty(alone.span, device=self.device)
            try:
                alone.decode(frames[slot], out=out, verify=flight.job.verify)
            except WireError:
                return sender
        return None


def _add(layout: Any, values: Tensor, target: Tensor | None) -> None:
    """Adds packed values where a layout's segments lie in the target."""
    assert target is not None
    segments = layout.segments
    torch._foreach_add_(
        [target[s.offset : s.offset + s.numel] for s in segments],
        list(torch.split(values, [s.numel for s in segments])),
    )
