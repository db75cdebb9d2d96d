"""Steps: what is done to a chunk, with two buffers, `wire` and `rows`.

    encode        the flat tensor           -> wire: a frame for each owner
    first hop     the others' frames        -> rows: this rank's frame from each of them
    total         rows and its own frame    -> shard, summed in rank order
    encode_sum    the shard                 -> wire (its own frame), copied to rows for the others
    second hop    rows                      -> wire: every owner's frame
    decode        wire                      -> the flat tensor

An all-reduce goes through all of them, a reduce-scatter ends with the total, an all-gather begins
with encode_owned. Between hosts there are a hop and a step more at either end:

    encode_local  the flat tensor           -> wire: a frame for each rank of this host
    first hop     the others' frames        -> rows
    encode_across rows and its own frame    -> sums of this host -> wire: a frame for each owner
    ...
    forward       the frames of its column  -> copied to rows, for each rank of this host
    last hop      rows                      -> wire: every owner's frame
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zcomm.engine.buffers import Exchange, Frames, grown, to_all, to_owners
from zcomm.engine.counters import Counters
from zcomm.engine.faults import Faults
from zcomm.engine.job import Flight, Job, Memory
from zcomm.sharding.chunks import Chunk
from zcomm.sharding.feedback import Hop
from zcomm.torch_private import foreach
from zcomm.wire.header import WireError

_CPU = torch.device("cpu")
# The place in a wire that a WireError names.
_PLACE = re.compile(r"^wire \d+, (frame|segment) (\d+)")


class Steps:
    """The steps of one rank. They run one at a time, so they share the shard and the stage.

    With `faults` decoders leave there what they find; without, a refused wire raises at once.
    """

    def __init__(
        self,
        rank: int,
        threads: int | None,
        device: torch.device = _CPU,
        faults: Faults | None = None,
    ) -> None:
        self.counters = Counters()
        self.device = device
        self._rank = rank
        self._threads = threads
        self._faults = faults
        self._shard = self._stage = torch.empty(0, dtype=torch.uint8, device=device)

    # Before the hops.

    def encode(self, flight: Flight) -> Exchange:
        """Encodes the flat tensor, each owner's frame for that owner."""
        return self._encode_source(flight, flight.whole, flight.feedback("sent"))

    def encode_local(self, flight: Flight) -> Exchange:
        """Encodes the flat tensor for the ranks of this host; without feedback."""
        return self._encode_source(flight, flight.local, None)

    def _encode_source(self, flight: Flight, frames: Frames, feedback: Hop | None) -> Exchange:
        job = flight.job
        self._count(flight)
        assert job.source is not None
        with self.counters.time("encode_s", "encode"):
            self._encode(job, frames.chunk.wire, job.source, frames.wire, feedback, job.prescale)
        return to_owners(frames)

    def encode_across(self, flight: Flight) -> Exchange:
        """Sums what the ranks of this host have, and encodes that for each owner."""
        local, across = flight.local, flight.coded
        with self.counters.time("decode_s", "decode_sum"):
            sums = self._shard_buffer(local.chunk)
            self._decode_sum(flight, local, local.chunk.own, sums)
        with self.counters.time("encode_s", "encode"):
            feedback = flight.feedback("sent")
            self._encode(flight.job, across.chunk.wire, sums, across.wire, feedback)
        return to_owners(across)

    def encode_sum(self, flight: Flight) -> Exchange:
        """Sums this rank's frames, and encodes the sum for all ranks."""
        return self._encode_own(flight, self.total(flight))

    def encode_owned(self, flight: Flight) -> Exchange:
        """The first step of an all-gather: the source is what this rank owns."""
        job, chunk = flight.job, flight.chunk
        self._count(flight)
        if job.memory is None:
            return self._encode_own(flight, self._part(job.source, chunk))
        direct = job.memory.direct(flight.index)
        with self.counters.time("encode_s", "encode_own"):
            if direct is not None:
                frames = flight.coded
                direct.own.encode(frames.own, verify=job.verify, threads=self._threads)
                return to_all(frames)
            shard = self._shard_buffer(chunk)
            job.memory.load(flight.index, shard)
        return self._encode_own(flight, shard)

    def forward(self, flight: Flight) -> Exchange:
        """All frames of this rank's column, as they are, for each rank of this host."""
        hops, column, wire = flight.hops, flight.coded.wire, flight.whole.wire
        sent, copies = column, hops.local.wire.peers - 1
        if copies > 1:
            sent = flight.slot.rows[: hops.forwarded_nbytes]
            sent.view(copies, hops.column_nbytes).copy_(column)
        arriving = wire[: wire.numel() - hops.column_nbytes]
        return Exchange(arriving, sent, hops.column_splits, hops.forward_splits)

    # After them.

    def total(self, flight: Flight) -> Tensor:
        """The sum of this rank's frames: in the target, or on its way to the second hop."""
        job, chunk, frames = flight.job, flight.chunk, flight.coded
        with self.counters.time("decode_s", "decode_sum"):
            if job.places and not job.accumulate:
                assert job.target is not None
                return self._decode_sum(flight, frames, job.places[flight.index], job.target)
            part = None if job.gather or job.places else self._part(job.target, chunk)
            direct = part is not None and part.dtype is chunk.sum_dtype
            shard = part if part is not None and direct else self._shard_buffer(chunk)
            self._decode_sum(flight, frames, chunk.own, shard)
            if job.places:
                _add(job.places[flight.index], shard, job.target)
            elif part is not None and not direct:
                part.copy_(shard)
        return shard

    def decode(self, flight: Flight) -> None:
        """Decodes all frames, this rank's own among them, into the target."""
        job, chunk = flight.job, flight.chunk
        with self.counters.time("decode_s", "decode"):
            try:
                if job.memory is not None:
                    self._decode_to_memory(flight, job.memory)
                elif job.target is not None and job.target.dtype is chunk.sum_dtype:
                    options = self._frame_options(flight, chunk.wire)
                    chunk.wire.decode(flight.whole.wire, out=job.target, **options)
                else:
                    self._decode_staged(flight)
            except WireError as error:
                raise self._refused(flight, self._refused_sender(flight), error) from error

    def buffer_nbytes(self) -> int:
        return self._shard.nbytes + self._stage.nbytes

    def _encode_own(self, flight: Flight, shard: Tensor) -> Exchange:
        """Encodes what this rank owns, for all ranks and for itself."""
        frames = flight.coded
        with self.counters.time("encode_s", "encode_own"):
            feedback = flight.feedback("owned")
            self._encode(flight.job, frames.chunk.own, shard, frames.own, feedback)
            return to_all(frames)

    def _encode(
        self,
        job: Job,
        layout: Any,
        source: Tensor,
        out: Tensor,
        feedback: Hop | None,
        prescale: float = 1.0,
    ) -> None:
        layout.encode(
            source,
            feedback.residuals if feedback else None,
            out=out,
            prescale=prescale,
            verify=job.verify,
            keep_idle=True,
            threads=self._threads,
        )
        if feedback:
            feedback.settle()

    def _decode_sum(self, flight: Flight, frames: Frames, layout: Any, out: Tensor) -> Tensor:
        ranks = sorted(frames.chunk.senders)  # in the order of what was received

        def sender(error: WireError) -> int | None:
            return None if error.wire_index is None else ranks[error.wire_index]

        options = self._options(flight, layout, sender)
        try:
            layout.decode_sum(frames.received(), out=out, **options)
        except WireError as error:
            raise self._refused(flight, sender(error), error) from error
        return out

    def _decode_staged(self, flight: Flight) -> None:
        """Kernels write fp32; a bf16 or fp16 target is filled from there."""
        target, segments = flight.job.target, flight.chunk.wire.segments
        assert target is not None
        foreach.copy_(
            [target[s.offset : s.offset + s.numel] for s in segments],
            list(torch.split(self._staged(flight), [s.numel for s in segments])),
        )

    def _decode_to_memory(self, flight: Flight, memory: Memory) -> None:
        direct = memory.direct(flight.index)
        if direct is not None:
            options = self._frame_options(flight, direct.others.layout)
            direct.others.decode(flight.whole.others, **options)
        else:
            memory.store(flight.index, self._staged(flight))

    def _staged(self, flight: Flight) -> Tensor:
        """The decoded elements of a chunk, packed."""
        chunk = flight.chunk
        nbytes = chunk.numel * chunk.sum_dtype.itemsize
        self._stage = grown(self._stage, nbytes)
        stage = self._stage[:nbytes].view(chunk.sum_dtype)
        options = self._frame_options(flight, chunk.packed)
        chunk.packed.decode(flight.whole.wire, out=stage, **options)
        return stage

    def _part(self, flat: Tensor | None, chunk: Chunk) -> Tensor:
        """What this rank owns of a chunk, in a tensor of all that it owns."""
        assert flat is not None
        return flat[chunk.shard_offset : chunk.shard_offset + chunk.own.numel]

    def _shard_buffer(self, chunk: Chunk) -> Tensor:
        nbytes = chunk.own.numel * chunk.sum_dtype.itemsize
        self._shard = grown(self._shard, nbytes)
        return self._shard[:nbytes].view(chunk.sum_dtype)

    def _count(self, flight: Flight) -> None:
        """What the same collective would send without a codec, in the tensor's own dtype."""
        job, chunk = flight.job, flight.chunk
        others = chunk.numel - chunk.own.numel if job.reduce else 0
        copies = chunk.own.numel * (chunk.wire.peers - 1) if job.gather else 0
        self.counters.raw_bytes += (others + copies) * job.itemsize

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
        return self._options(flight, layout, partial(_sender_of, flight.chunk.senders, layout))

    def _refused(self, place: object, sender: int | None, error: WireError) -> WireError:
        return WireError(
            f"rank {self._rank}: {place}: corrupted wire from rank {sender}: {error}", sender
        )

    def _refused_sender(self, flight: Flight) -> int | None:
        """Whose frame is refused, one by one."""
        layout = flight.chunk.wire
        frames = torch.split(flight.whole.wire, list(layout.frame_nbytes))
        for slot, sender in enumerate(flight.chunk.senders):
            alone = layout.for_peer(slot)
            out = torch.empty(alone.span, device=self.device)
            try:
                alone.decode(frames[slot], out=out, verify=flight.job.verify)
            except WireError:
                return sender
        return None


def _sender_of(senders: Sequence[int], layout: Any, error: WireError) -> int:
    """Whose frame it is in which an error names a frame or a segment."""
    peer, found = 0, _PLACE.search(str(error))
    if found is not None:
        index = int(found[2])
        peer = index if found[1] == "frame" else layout.segments[index].peer
    return senders[peer]


def _add(layout: Any, values: Tensor, target: Tensor | None) -> None:
    """Adds packed values where a layout's segments lie in the target."""
    assert target is not None
    segments = layout.segments
    foreach.add_(
        [target[s.offset : s.offset + s.numel] for s in segments],
        list(torch.split(values, [s.numel for s in segments])),
    )
