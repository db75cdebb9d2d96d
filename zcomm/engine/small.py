"""Small jobs: one exchange of parcels takes the place of their check and of all hops.

Native code encodes and decodes a parcel as a whole (csrc/shm/coded.h); what needs Python takes the
pipeline's steps. Both put the same bytes into a parcel.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zcomm.engine.coded import Coded, coded_of
from zcomm.engine.job import ALL_REDUCE, Job
from zcomm.engine.native import Refused
from zcomm.engine.parcel import Parcels, ParcelSlot, is_small
from zcomm.engine.pipeline import Pipeline
from zcomm.engine.transit import Transit
from zcomm.kernels import cpu


class Small(Protocol):
    """A job that fits into parcels."""

    def put(self, parcels: Parcels) -> None:
        """Encodes what this rank sends, into every parcel."""

    def take(self, parcels: Parcels) -> None:
        """What the parcels of all ranks have goes to the caller's memory."""


class _Native(NamedTuple):
    job: Job
    coded: Coded
    room: Tensor  # its own: the pipeline's is for other chunks while parcels are under way
    native: Any
    pipeline: Pipeline

    def put(self, parcels: Parcels) -> None:
        with self.pipeline.counters.time("encode_s", "encode"):
            parcels.native.put(self.native)
        chunk = self.job.chunks[0]
        self.pipeline.count(self.job, chunk)
        sent = chunk.wire.wire_nbytes if self.job.collective.reduce else chunk.own_nbytes
        self.pipeline.counters.wire_bytes += sent * (chunk.wire.peers - 1)

    def take(self, parcels: Parcels) -> None:
        with self.pipeline.counters.time("decode_s", "decode"):
            refused = parcels.native.take(self.native)
        if refused is not None:
            place = f"{self.job.what}, its one exchange"
            raise self.pipeline.refused(place, self.job.chunks[0], *Refused(*refused))


class _Steps(NamedTuple):
    transit: Transit
    slot: ParcelSlot
    pipeline: Pipeline

    def put(self, parcels: Parcels) -> None:
        self.pipeline.prepare_small(self.transit)
        self.slot.send(self.transit.whole, parcels, self.transit.job.collective.reduce)

    def take(self, parcels: Parcels) -> None:
        self.slot.arrive(parcels)
        self.pipeline.finish_small(self.transit)


def small_of(job: Job, world_size: int, pipeline: Pipeline) -> Small | None:
    """None if it does not fit into parcels."""
    if not is_small(job, world_size):
        return None
    coded = coded_of(job)
    if coded is None:
        slot = ParcelSlot(job.chunks[0])
        return _Steps(Transit(job, 0, slot, ()), slot, pipeline)
    coded = coded._replace(is_small=job.collective == ALL_REDUCE)
    room = coded.room(job, lambda n: torch.empty(n, dtype=torch.float32, device="cpu"))
    native = coded.native(job, cpu.call(*job.collective), room, pipeline)
    return _Native(job, coded, room, native, pipeline)
