"""CPU time of a codec, measured the way the engine uses it: chunk after chunk."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm import codecs

# The engine's chunk, and enough of them that none is still in a cache when it is read.
CHUNK_NUMEL = 1 << 20
CHUNKS = 16
# Sums of a few and of many wires give the cost of a sum and of each wire in it.
FEW, MANY = 2, 4


class CodecCost(NamedTuple):
    """CPU seconds per element."""

    encode_s: float
    decode_s: float
    sum_s: float  # of decode_sum, for any number of wires
    sum_wire_s: float  # in addition, for each wire

    def summed_s(self, wires: int) -> float:
        return self.sum_s + self.sum_wire_s * wires


def measure_costs(rank: int, world_size: int, specs: list[str]) -> dict[str, CodecCost]:
    """Runs on every rank at once: they share memory and caches, as in a collective."""
    source = torch.randn(CHUNKS * CHUNK_NUMEL, generator=torch.Generator().manual_seed(rank))
    target = torch.zeros_like(source)  # touches its pages: a real target is reused every step
    return {spec: cost_of(spec, source, target) for spec in specs}


def cost_of(spec: str, source: Tensor, target: Tensor) -> CodecCost:
    codec = codecs.codec(spec)
    n = CHUNK_NUMEL
    xs, outs = torch.split(source, n), torch.split(target, n)
    residuals = [codec.new_residual(n) if codec.needs_feedback else None for _ in xs]
    wires = [codec.encode(x, residual) for x, residual in zip(xs, residuals)]

    def encode(i: int) -> object:
        return codec.encode(xs[i], residuals[i], out=wires[i], prescale=0.5)

    def decode(i: int) -> object:
        return codec.decode(wires[i], n, out=outs[i])

    def decode_sum(count: int, i: int) -> object:
        some = [wires[(i + j) % CHUNKS] for j in range(count)]
        return codec.decode_sum(some, n, out=outs[i])

    dist.barrier()
    few, many = (typical_s(partial(decode_sum, count)) for count in (FEW, MANY))
    wire_s = max(many - few, 0.0) / (MANY - FEW)
    sum_s = max(few - FEW * wire_s, 0.0)
    return CodecCost(typical_s(encode) / n, typical_s(decode) / n, sum_s / n, wire_s / n)


def typical_s(call: Callable[[int], object]) -> float:
    """The lower quartile over all chunks: other load only makes calls slower."""
    seconds = []
    for i in range(CHUNKS):
        start = time.perf_counter()
        call(i)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[CHUNKS // 4]
