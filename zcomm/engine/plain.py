"""Plain jobs: uncompressed numbers among the ranks of a host.

Where all of a job is sent as `none`, `bf16` or `fp16` and nothing is fed back, there is no frame to
make and no block to keep whole. One native loop takes the job through the ring, from where its
numbers lie to where they belong (csrc/shm/plain.h). Its bits are those of the codec's own kernels.
"""

from typing import Any, NamedTuple

import torch

from zcomm import kernels
from zcomm.codecs import Codec
from zcomm.engine.job import ALL_REDUCE, Job, Memory
from zcomm.engine.native import End
from zcomm.engine.pipeline import Pipeline
from zcomm.kernels.cpu import CpuKernels

_WIRE_DTYPES = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CPU = torch.device("cpu")


class Plain(NamedTuple):
    """A plain job's codec, the kernels for it, and where its numbers lie."""

    codec: Codec
    kernels: CpuKernels
    memory: Memory

    def run(self, ring: Any, job: Job, call: Any, pipeline: Pipeline) -> End:
        memory = self.memory
        end = ring.run_plain(
            call,
            self.kernels.isa,
            self.codec.id,
            job.encoding.prescale if job.collective.reduce else 1.0,
            memory.strips,
            memory.source.place,
            memory.target.place,
            memory.owned.own_strip,
            memory.own.place,
            memory.accumulate,
        )
        return End(*end)

    def place(self, job: Job, end: End) -> str:
        return f"{job.what}, part {end.chunk + 1} of {end.chunks}"

    def sent_nbytes(self, job: Job, end: End) -> int:
        itemsize = _WIRE_DTYPES[self.codec.name].itemsize
        if (
            job.collective == ALL_REDUCE and end.begun is not None
        ):  # one exchange: peers read it all
            wire = job.chunks[0].wire
            return itemsize * int(wire.numel) * (wire.peers - 1)
        return itemsize * job.chunks.totals.numel(*job.collective)


def plain_of(job: Job) -> Plain | None:
    """None if the job has to be encoded."""
    codec = job.chunks.only_codec
    if codec is None or codec.name not in _WIRE_DTYPES or job.chunks.raw:
        return None
    memory = job.data.memory(job.chunks, job.collective)
    if memory is None:
        return None
    if job.encoding.feedback is not None and not job.encoding.feedback.is_empty:
        return None
    # Sums are fp32. What all ranks get is what was sent: fp32 is made of anything, halves are not.
    written = memory.target if job.collective.gather else memory.own
    fits = (torch.float32, _WIRE_DTYPES[codec.name]) if job.collective.gather else (torch.float32,)
    chosen = kernels.select(_CPU, None)
    if written.dtype not in fits or not isinstance(chosen, CpuKernels):
        return None
    return Plain(codec, chosen, memory)
