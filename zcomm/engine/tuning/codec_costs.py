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

    def summed_s(self, wires: float) -> float:
        return self.sum_s + self.sum_wire_s * wires


def measure_costs(rank: int, world_size: int, specs: list[str]) -> dict[str, CodecCost]:
    """Runs on every rank at once: they share memory and caches, as in a collective."""
    source = torch.randn(CHUNKS * CHUNK_NUMEL, generator=torch.Generator().manual_seed(rank))
    target = torch.zeros_like(source)  # touches its pages: a real target is reused every step
    costs = {}
    for spec in specs:
        dist.barrier()
        costs[spec] = cost_of(spec, source, target)
    return costs


def cost_of(
    spec: str, source: Tensor, target: Tensor, n: int = CHUNK_NUMEL, threads: int | None = None
) -> CodecCost:
    """From chunks of n elements of two tensors that are as long as each other."""
    codec = codecs.codec(spec)
    xs, outs = torch.split(source, n), torch.split(target, n)
    residuals = [codec.new_residual(n) if codec.needs_feedback else None for _ in xs]
    wires = [codec.encode(x, residual) for x, residual in zip(xs, residuals)]

    def encode(i: int) -> object:
        return codec.encode(xs[i], residuals[i], out=wires[i], prescale=0.5, threads=threads)

    def decode(i: int) -> object:
        return codec.decode(wires[i], n, out=outs[i], threads=threads)

    def decode_sum(count: int, i: int) -> object:
        some = [wires[(i + j) % len(wires)] for j in range(count)]
        return codec.decode_sum(some, n, out=outs[i], threads=threads)

    few, many = (typical_s(partial(decode_sum, count), len(xs)) for count in (FEW, MANY))
    wire_s = max(many - few, 0.0) / (MANY - FEW)
    sum_s = max(few - FEW * wire_s, 0.0)
    encode_s, decode_s = (typical_s(call, len(xs)) for call in (encode, decode))
    return CodecCost(encode_s / n, decode_s / n, sum_s / n, wire_s / n)


def typical_s(call: Callable[[int], object], chunks: int) -> float:
    """The lower quartile over all chunks: other load only makes calls slower."""
    seconds = []
    for i in range(chunks):
        start = time.perf_counter()
        call(i)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[chunks // 4]
