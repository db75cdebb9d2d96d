"""Coded jobs: encoded chunks among the ranks of a host, in one native loop (csrc/shm/coded.h).

Each chunk is encoded into this rank's slot of the ring and decoded from the slots of its peers, by
the codec's own kernels. Python would take as long over a chunk as they do, and longer over a small
one, whose memory stays in the cache from its first step to its last. What needs Python at every
chunk takes the same steps there: zcomm.engine.host.Turns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
        room = self.room(job, pipeline.sums)
        end, refusal = ring.run_coded(self.native(job, call, room, pipeline))
        return End(*end)._replace(refused=None if refusal is None else Refused(*refusal))

    def native(self, job: Job, call: Any, room: Tensor, pipeline: Pipeline) -> Any:
        """The job for native code, which works in `room` and in the job's own memory: keep both."""
        memory, encoding, feedback = self.memory, job.encoding, job.encoding.feedback
        frames = room.data_ptr()  # of a small job: its sums lie behind them
        sums = frames + (job.chunks[0].wire.wire_nbytes if self.is_small else 0)
        return cpu.coded_job(
            call,
            self.kernels.isa,
            pipeline.threads,
            encoding.prescale,
            encoding.verify,
            job.chunks.native,
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

    def room(self, job: Job, floats: Callable[[int], Tensor]) -> Tensor:
        """Memory for an all-reduce: for sums, in front of them for the frames of a small one."""
        if job.collective != ALL_REDUCE:
            return floats(0)
        if not self.is_small:
            return floats(job.chunks.sums_numel)
        wire = job.chunks[0].wire
        return floats(wire.numel + wire.wire_nbytes // 4)

    def place(self, job: Job, end: End) -> str:
        if self.is_small:
            return f"{job.what}, its one exchange"
        return job.place(end.hop(job), end.chunk)

    def sent_nbytes(self, job: Job, end: End) -> int:
        if self.is_small:  # each peer reads all of it
            wire = job.chunks[0].wire
            return int(wire.wire_nbytes) * (wire.peers - 1)
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
