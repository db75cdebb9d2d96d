"""Coded jobs: encoded chunks among the ranks of a host, in one native loop (csrc/shm/coded.h).

Each chunk is encoded into this rank's slot of the ring and decoded from the slots of its peers, by
the codec's own kernels. Python would take as long over a chunk as they do, and longer over a small
one, whose memory stays in the cache from its first step to its last. What needs Python at every
chunk takes the same steps there: zcomm.engine.host.Turns.
"""

from typing import Any, NamedTuple

import torch

from zcomm import kernels
from zcomm.engine.job import ALL_REDUCE, Job, Memory
from zcomm.engine.native import End, Refused
from zcomm.engine.pipeline import Pipeline
from zcomm.kernels import cpu
from zcomm.kernels.cpu import CpuKernels

_CPU = torch.device("cpu")
# It takes less time to sum this much for all owners than to wait once more.
_SMALL_NUMEL = 1 << 14


class Coded(NamedTuple):
    """The kernels of a coded job, where its numbers lie, and whether one exchange is enough."""

    kernels: CpuKernels
    memory: Memory
    is_small: bool

    def run(self, ring: Any, job: Job, call: Any, pipeline: Pipeline) -> End:
        end, refusal = ring.run_coded(self.native(job, call, pipeline))
        return End(*end)._replace(refused=None if refusal is None else Refused(*refusal))

    def native(self, job: Job, call: Any, pipeline: Pipeline) -> Any:
        """The job for native code, which it can use as long as this and the job exist."""
        memory, encoding, feedback = self.memory, job.encoding, job.encoding.feedback
        sums, frames = self._room(job, pipeline)
        return cpu.coded_job(
            call,
            self.kernels.isa,
            pipeline.threads,
            encoding.prescale,
            encoding.verify,
            job.chunks.coded,
            memory.owned.own_parts,
            memory.source.place,
            memory.target.place,
            memory.own.place,
            sums,
            job.chunks.small_parts if self.is_small else None,
            frames,
            None if feedback is None else feedback.sent_tables,
            None if feedback is None else feedback.owned_tables,
        )

    def _room(self, job: Job, pipeline: Pipeline) -> tuple[int, int]:
        """Addresses of memory for an all-reduce: for sums, and for the frames of a small one."""
        if job.collective != ALL_REDUCE:
            return 0, 0
        if not self.is_small:
            return pipeline.sums(job.chunks.sums_numel).data_ptr(), 0
        wire = job.chunks[0].wire
        room = pipeline.sums(wire.numel + wire.wire_nbytes // 4).data_ptr()
        return room + wire.wire_nbytes, room

    def place(self, job: Job, end: End) -> str:
        if self.is_small:
            return f"{job.what}, its one exchange"
        return job.place(end.hop(job), end.chunk)

    def sent_nbytes(self, job: Job) -> int:
        return job.chunks.totals.nbytes(*job.collective)


def coded_of(job: Job) -> Coded | None:
    """None if some of its steps need Python."""
    chunks, feedback = job.chunks, job.encoding.feedback
    if not chunks or chunks.raw or (feedback is not None and feedback.averages):
        return None
    memory = job.data.memory(chunks, job.collective)
    if memory is None or memory.accumulate or memory.owned.own_parts is None:
        return None
    written = memory.target if job.collective.gather else memory.own
    chosen = kernels.select(_CPU, None)
    if written.dtype is not torch.float32 or not isinstance(chosen, CpuKernels):
        return None
    return Coded(chosen, memory, _is_small(job))


def _is_small(job: Job) -> bool:
    """Whether every rank does for all owners what they would do: one exchange instead of two. The
    residual of a sum is at its owner, and nobody else can encode it."""
    if job.collective != ALL_REDUCE or len(job.chunks) != 1:
        return False
    chunk, feedback = job.chunks[0], job.encoding.feedback
    fed_back = feedback is not None and not feedback.is_empty
    return not fed_back and chunk.numel * chunk.wire.peers <= _SMALL_NUMEL
