"""Plain jobs: uncompressed numbers among the ranks of a host.

Where all of a job is sent as `none`, `bf16` or `fp16` and nothing is fed back, there is no frame to
make and no block to keep whole. One native loop takes the job through the ring, from where its
numbers lie to where they belong (csrc/shm/plain.h). Its bits are those of the codec's own kernels.
"""

from typing import NamedTuple

import torch

from zcomm import kernels
from zcomm.codecs import Codec
from zcomm.engine.job import Job, Memory, Span
from zcomm.kernels.base import GRAD_DTYPES
from zcomm.kernels.cpu import CpuKernels
from zcomm.transport.shared_memory.ring import Ring

_WIRE_DTYPES = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CPU = torch.device("cpu")


class Plain(NamedTuple):
    """A plain job's codec, the kernels for it, and where its numbers lie."""

    codec: Codec
    kernels: CpuKernels
    memory: Memory


def plain_of(job: Job) -> Plain | None:
    """None if the job must be encoded chunk by chunk."""
    codec = job.chunks.only_codec
    if codec is None or codec.name not in _WIRE_DTYPES or job.chunks.raw:
        return None
    memory = job.data.memory(job.chunks, job.collective)
    if memory is None:
        return None
    if any(hop is not None for chunk in job.encoding.feedback or () for hop in chunk):
        return None
    # Sums are fp32. What all ranks get is what was sent: fp32 is made of anything, halves are not.
    written = memory.target if job.collective.gather else memory.own
    fits = (torch.float32, _WIRE_DTYPES[codec.name]) if job.collective.gather else (torch.float32,)
    chosen = kernels.select(_CPU, None)
    if written.dtype not in fits or not isinstance(chosen, CpuKernels):
        return None
    return Plain(codec, chosen, memory)


class End(NamedTuple):
    """How a job ended: what its last wait saw (None: all is done), and in which of its steps."""

    seen: tuple[int, ...] | None
    step: int
    steps: int


def run_plain(ring: Ring, plain: Plain, job: Job, signature: int, spins: int) -> End:
    """Runs the job as far as the other ranks let it."""
    memory = plain.memory
    prescale = job.encoding.prescale if job.collective.reduce else 1.0
    return End(
        *ring.native.run_plain(
            plain.kernels.isa,
            plain.codec.id,
            *job.collective,
            signature,
            prescale,
            memory.strips,
            _place(memory.source),
            _place(memory.target),
            memory.own_strip,
            _place(memory.own),
            memory.accumulate,
            ring.deadline_s,
            spins,
        )
    )


def _place(span: Span) -> tuple[int, int]:
    return span.address, GRAD_DTYPES[span.dtype]


def sent_nbytes(plain: Plain, job: Job) -> int:
    """What the peers read of this rank's memory."""
    itemsize = _WIRE_DTYPES[plain.codec.name].itemsize
    return itemsize * sum(chunk.sent_numel(*job.collective) for chunk in job.chunks)
