"""The pipeline: what happens to a chunk, from the caller's tensor to the wire and back.

A chunk has a slot with two buffers, `wire` and `rows`. One hop:

    encode          the tensor                -> wire: a frame for each owner
    reduce-scatter  the others' frames        -> rows: this rank's frame from each of them
    sum             rows and its own frame    -> the sum of what this rank owns
    encode_sum      the sum                   -> wire (its own frame), copied to rows
    all-gather      rows                      -> wire: every owner's frame
    decode          wire                      -> the tensor

An all-reduce does all of it, a reduce-scatter ends with the sum, an all-gather starts with
encode_owned. With several ranks on each of several hosts there is one more hop at either end:

    encode_local    the tensor                -> wire: a frame for each rank of this host
    inside a host   the others' frames        -> rows
    encode_across   rows and its own frame    -> sums of this host -> wire: a frame for each owner
    ...
    forward         the frames of its column  -> rows: a copy for each rank of this host
    inside a host   rows                      -> wire: every owner's frame

zcomm/conformance/all_reduce.py is the same without an engine, in 40 lines.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from zcomm.codecs.scattered import ScatteredLayout
from zcomm.engine.buffers import Exchange, Frames, Slot, TwoSlots, grown, to_all, to_owners
from zcomm.engine.coder import Coder, owner_of
from zcomm.engine.counters import Counters
from zcomm.engine.faults import Faults
from zcomm.engine.job import ALL_REDUCE, Job, signature_number
from zcomm.engine.parcel import ParcelSlot
from zcomm.engine.transit import Stage, Transit
from zcomm.kernels.base import Fault, wire_error
from zcomm.sharding.chunks import Chunk
from zcomm.sharding.residual_store import Hop
from zcomm.torch_private.autograd import Range
from zcomm.transport.channels import Channel, Transport
from zcomm.transport.shared_memory.ring import Counter, Ring, RingWork
from zcomm.wire.header import WireError

# Chunks in flight: one is encoded while others are on the network, in either hop.
SLOTS = 4
_CPU = torch.device("cpu")


class Pipeline:
    """The stages of one rank's chunks. Steps run one at a time, so they share scratch memory."""

    def __init__(
        self,
        transport: Transport,
        threads: int | None,
        device: torch.device = _CPU,
        faults: Faults | None = None,
    ) -> None:
        self.counters, self.threads = Counters(), threads
        self.slots = [Slot(device) for _ in range(SLOTS)]
        self._transport = transport
        self._coder = Coder(transport.rank, transport.ranks, threads, faults)
        self._shard = self._stage = torch.empty(0, dtype=torch.uint8, device=device)

    def stages(self, job: Job) -> tuple[Stage, ...]:
        """The hops of a job's chunks. All hops of all jobs have one order: transport.channels()."""
        reduce, gather = job.collective
        prepare = self.encode_sum if reduce else self.encode_owned
        if not job.chunks or job.chunks[0].hops is None:
            there, back = self._transport.flat
            stages = [
                Stage("reduce-scatter", there, self.encode, self._over(there, _to_owners)),
                Stage("all-gather", back, prepare, self._over(back, _to_all)),
            ]
        else:
            stages = self._four_stages(prepare, self.shares(job))
        half = len(stages) // 2
        return tuple(stages[0 if reduce else half : None if gather else half])

    def _four_stages(self, prepare: Callable[[Transit], None], share: bool) -> list[Stage]:
        """Two hops, there and back. Ranks that share memory send nothing inside a host; one that is
        alone there has only the hops between hosts."""
        local, across = self._transport.local, self._transport.across
        assert across is not None
        there, back = across
        to_owners, to_all = self._over(there, _to_owners), self._over(back, _to_all)
        if local is None:
            return [
                Stage("reduce-scatter between hosts", there, self.encode, to_owners),
                Stage("all-gather between hosts", back, prepare, to_all),
            ]
        publish = self._publish if share else self._over(local.reduce, _to_neighbours)
        forward = self._share_column if share else self._over(local.gather, self.forward)
        return [
            Stage("reduce-scatter inside a host", local.reduce, self.encode_local, publish),
            Stage("reduce-scatter between hosts", there, self.encode_across, to_owners),
            Stage("all-gather between hosts", back, prepare, to_all),
            Stage("all-gather inside a host", local.gather, lambda t: None, forward),
        ]

    def shares(self, job: Job) -> bool:
        """Whether the hops inside a host of a job with two go through shared memory."""
        ring = self._transport.ring
        if not isinstance(ring, Ring) or not job.chunks or job.chunks[0].hops is None:
            return False
        return job.chunks.shared_nbytes <= ring.slot_nbytes

    def _over(
        self, channel: Channel, exchange_of: Callable[[Transit], Exchange]
    ) -> Callable[[Transit], Work]:
        """A hop over a channel."""

        def start(transit: Transit) -> Work:
            exchange = exchange_of(transit)
            self.counters.wire_bytes += exchange.send.numel()
            return channel.all_to_all(*exchange)

        return start

    def _publish(self, transit: Transit) -> RingWork:
        """The frames for the ranks of this host are where these read them."""
        ring, number = self._ring_of(transit)
        ring.publish(number, signature_number(transit.job.signature))
        self.counters.add_shared(transit.hops.local.others_nbytes)
        return RingWork(ring, Counter.PUBLISHED, number)

    def _share_column(self, transit: Transit) -> RingWork:
        """All frames of this rank's column, for the ranks of this host."""
        ring, number = self._ring_of(transit)
        assert isinstance(transit.slot, TwoSlots)
        transit.slot.share_column(transit.coded.wire)
        ring.done(Counter.REDUCED, number)
        self.counters.add_shared(transit.hops.forwarded_nbytes)
        return RingWork(ring, Counter.REDUCED, number)

    def take_shared(self, job: Job, index: int, between: Slot) -> TwoSlots:
        """The next slot of the ring, which is free, for a chunk with two hops."""
        ring, hops = self._transport.ring, job.chunks[index].hops
        assert isinstance(ring, Ring)
        assert hops is not None
        number = ring.take()
        if not job.collective.reduce:  # there is nothing to read before the column is there
            ring.publish(number, signature_number(job.signature))
        return TwoSlots(ring, number, between, hops)

    def leave_shared(self, transit: Transit) -> None:
        """This rank is through with the ring's slots of a chunk."""
        ring, number = self._ring_of(transit)
        if not transit.job.collective.gather:
            ring.done(Counter.REDUCED, number)
        ring.done(Counter.COLLECTED, number)

    def _ring_of(self, transit: Transit) -> tuple[Ring, int]:
        assert isinstance(self._transport.ring, Ring)
        assert isinstance(transit.slot, TwoSlots)
        return self._transport.ring, transit.slot.inside.number

    def send(self, transit: Transit) -> None:
        """Makes the bytes of a transit's stage ready, and starts its hop."""
        stage = transit.stages[transit.stage]
        stage.prepare(transit)  # may refuse what the hop before brought
        transit.hop = stage.hop
        with Range("zcomm::send"):
            transit.work, transit.sent_at = stage.start(transit), perf_counter()

    def finish(self, transit: Transit) -> None:
        """After the last hop: the result goes to the caller's memory."""
        if transit.job.collective.gather:
            self.decode(transit)
        else:
            self.sum(transit)

    # A small job, whose parcels take the place of both hops.

    def prepare_small(self, transit: Transit) -> None:
        """Its frames are ready for the parcels."""
        transit.hop = "parcel"
        reduce, _ = transit.job.collective
        self.encode(transit) if reduce else self.encode_owned(transit)
        frames = transit.whole
        sent = frames.wire if reduce else frames.own
        self.counters.wire_bytes += sent.numel() * (transit.chunk.wire.peers - 1)

    def finish_small(self, transit: Transit) -> None:
        """The parcels have arrived: the result goes to the caller's memory."""
        if transit.job.collective == ALL_REDUCE:
            assert isinstance(transit.slot, ParcelSlot)
            transit.slot.sum_for_others(transit, self._coder)
            self.encode_sum(transit)
        self.finish(transit)

    def refused(self, place: str, chunk: Chunk, fault: Fault, summed: int | None) -> WireError:
        """The error for a wire that native code refused: while it summed the frames of an owner, or
        while it decoded those of all."""
        layout: Any = chunk.wire if summed is None else chunk.owned_layouts[summed]
        error = wire_error(layout, *fault)
        sender = owner_of(chunk, layout)(error) if summed is None else error.wire_index
        return self._coder.refused(place, error, sender)

    def buffer_nbytes(self) -> int:
        slots = sum(slot.nbytes() for slot in self.slots)
        return slots + self._shard.nbytes + self._stage.nbytes

    # Before a hop.

    def encode(self, transit: Transit) -> None:
        """The caller's tensor, each owner's frame for that owner. (A rank that is alone on its host
        is the deputy of all owners: what it sends between hosts is its whole wire.)"""
        self._encode_source(transit, transit.whole, transit.sent)

    def encode_local(self, transit: Transit) -> None:
        """The caller's tensor, for the ranks of this host; without feedback."""
        self._encode_source(transit, transit.local, None)

    def _encode_source(self, transit: Transit, frames: Frames, hop: Hop | None) -> None:
        self.count(transit.job, transit.chunk)
        source, prescale = transit.job.data.source, transit.job.encoding.prescale
        with self.counters.time("encode_s", "encode"):
            self._coder.encode(transit, frames.chunk.wire, source, frames.wire, hop, prescale)

    def encode_across(self, transit: Transit) -> None:
        """The sum over the ranks of this host, each owner's frame for that owner."""
        local, across = transit.local, transit.coded
        with self.counters.time("decode_s", "decode_sum"):
            sums = self._shard_buffer(local.chunk)
            self._coder.decode_sum(transit, local, local.chunk.own, sums)
        with self.counters.time("encode_s", "encode"):
            self._coder.encode(transit, across.chunk.wire, sums, across.wire, transit.sent)

    def encode_sum(self, transit: Transit) -> None:
        """The sum of this rank's frames, for all ranks."""
        with self.counters.time("decode_s", "decode_sum"):
            shard = self._shard_buffer(transit.chunk)
            self._coder.decode_sum(transit, transit.coded, transit.chunk.own, shard)
        self._encode_own(transit, shard)

    def encode_owned(self, transit: Transit) -> None:
        """What this rank owns, for all ranks: an all-gather starts here."""
        self.count(transit.job, transit.chunk)
        data = transit.job.data
        owned = data.owned(transit.index, transit.chunk)
        if isinstance(owned, ScatteredLayout):
            with self.counters.time("encode_s", "encode_own"):
                self._coder.encode_scattered(transit, owned, transit.coded.own)
            return
        if owned is None:
            owned = self._shard_buffer(transit.chunk)
            with self.counters.time("encode_s", "encode_own"):
                data.load(transit.index, transit.chunk, owned)
        self._encode_own(transit, owned)

    def _encode_own(self, transit: Transit, shard: Tensor) -> None:
        frames = transit.coded
        with self.counters.time("encode_s", "encode_own"):
            self._coder.encode(transit, frames.chunk.own, shard, frames.own, transit.owned)

    def forward(self, transit: Transit) -> Exchange:
        """All frames of this rank's column, as they are, for each rank of this host."""
        hops, column, wire = transit.hops, transit.coded.wire, transit.whole.wire
        sent, copies = column, hops.local.wire.peers - 1
        if copies > 1:
            assert isinstance(transit.slot, Slot)
            sent = transit.slot.rows[: hops.forwarded_nbytes]
            sent.view(copies, hops.column_nbytes).copy_(column)
        arriving = wire[: wire.numel() - hops.column_nbytes]
        return Exchange(arriving, sent, hops.column_splits, hops.forward_splits)

    # After the last hop.

    def sum(self, transit: Transit) -> None:
        """The sum of this rank's frames, into the caller's memory."""
        data, index, chunk = transit.job.data, transit.index, transit.chunk
        with self.counters.time("decode_s", "decode_sum"):
            into = data.sum_destination(index, chunk)
            layout, out = into if into is not None else (chunk.own, self._shard_buffer(chunk))
            self._coder.decode_sum(transit, transit.coded, layout, out)
            if into is None:
                data.store_sum(index, chunk, out)

    def decode(self, transit: Transit) -> None:
        """All frames, this rank's own among them, into the caller's memory."""
        data, index, chunk = transit.job.data, transit.index, transit.chunk
        with self.counters.time("decode_s", "decode"):
            into = data.destination(index, chunk)
            if into is None:
                values = self._coder.decode(transit, chunk.packed, self._stage_buffer(chunk))
                data.store(index, chunk, values)
            elif isinstance(into, ScatteredLayout):
                self._coder.decode_scattered(transit, into)
            else:
                self._coder.decode(transit, into.layout, into.tensor)

    def _shard_buffer(self, chunk: Chunk) -> Tensor:
        return self.sums(chunk.own.numel, chunk.sum_dtype)

    def sums(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Room for the sums of what this rank owns of a chunk."""
        nbytes = numel * dtype.itemsize
        self._shard = grown(self._shard, nbytes)
        return self._shard[:nbytes].view(dtype)

    def _stage_buffer(self, chunk: Chunk) -> Tensor:
        nbytes = chunk.numel * chunk.sum_dtype.itemsize
        self._stage = grown(self._stage, nbytes)
        return self._stage[:nbytes].view(chunk.sum_dtype)

    def count(self, job: Job, chunk: Chunk) -> None:
        """What the same collective would send without a codec, in the tensor's own dtype."""
        self.counters.raw_bytes += chunk.sent_numel(*job.collective) * job.data.itemsize

    def count_whole(self, job: Job, sent_nbytes: int) -> None:
        """The same for all chunks of a job that native code has run in shared memory."""
        numel = job.chunks.totals.numel(*job.collective)
        self.counters.raw_bytes += numel * job.data.itemsize
        self.counters.add_shared(sent_nbytes)


def _to_owners(transit: Transit) -> Exchange:
    return to_owners(transit.coded)


def _to_neighbours(transit: Transit) -> Exchange:
    return to_owners(transit.local)


def _to_all(transit: Transit) -> Exchange:
    return to_all(transit.coded)
