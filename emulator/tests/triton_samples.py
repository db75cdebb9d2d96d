"""Small Triton kernels with what zcomm's use: what they compute is known from plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl

ROWS, BLOCK, COUNT = 16, 128, 1024


class Variant(NamedTuple):
    """As zcomm.kernels.triton.registry has them, with types of all kinds."""

    name: str
    function: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, int]
    num_warps: int = 4

    def options_for(self, backend: str) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "enable_fp_fusion": False}


@triton.jit
def quantise(x, rest, codes, words, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of blocks: nibbles by absmax, what is left over, a checksum, a minimum, a count."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None].to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    v = tl.load(x + at, mask=at < n, other=0.0)
    largest = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), 7.0)
    q = (v * tl.div_rn(1.0, scale)[:, None] + 12582912.0) - 12582912.0
    low, high = tl.split(tl.reshape(q.to(tl.int32) & 15, (ROWS, BLOCK // 2, 2)))
    byte = low | (high << 4)
    byte_at = rows[:, None].to(tl.int64) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    tl.store(codes + byte_at, byte.to(tl.uint8), mask=byte_at * 2 < n)
    tl.store(rest + at, v - q * scale[:, None], mask=at < n)
    checksum = tl.sum(tl.sum(byte.to(tl.int64) * (2 * byte_at + 1), axis=1), axis=0)
    tl.atomic_add(words, checksum, sem="relaxed")
    tl.atomic_min(words + 1, checksum)
    if tl.atomic_add(words + 2, 1) == tl.num_programs(0) - 1:
        tl.store(words + 3, tl.atomic_add(words, 0))


@triton.jit
def rotate(x, out, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """Hadamard butterflies over blocks, from the largest stride down."""
    at = tl.arange(0, COUNT)
    v = tl.reshape(tl.load(x + at), (COUNT // BLOCK, BLOCK))
    h: tl.constexpr = BLOCK // 2
    v = tl.reshape(v, (COUNT // BLOCK, 2, h))
    a, b = tl.split(tl.permute(v, (0, 2, 1)))
    v = tl.permute(tl.join(a + b, a - b), (0, 2, 1))
    v = tl.reshape(v, (COUNT // 2, 2))
    a, b = tl.split(v)
    v = tl.join(a + b, a - b)
    tl.store(out + at, tl.reshape(v, (COUNT,)))


@triton.jit
def count_bytes(x, counts, sums, COUNT: tl.constexpr):
    """A histogram of high bytes, and its running sum."""
    u = tl.load(x + tl.arange(0, COUNT)).to(tl.int32, bitcast=True)
    found = tl.histogram((u >> 24) & 255, 256)
    tl.store(counts + tl.arange(0, 256), found)
    tl.store(sums + tl.arange(0, 256), tl.cumsum(found, 0))


@triton.jit
def add_up(addresses, out, count, factor, COUNT: tl.constexpr):
    """A sum over tensors of fp16 by their addresses, in order, then its root."""
    at = tl.arange(0, COUNT)
    total = tl.zeros((COUNT,), tl.float32)
    for i in range(count):
        tensor = tl.load(addresses + i).to(tl.pointer_type(tl.float16))
        total += tl.load(tensor + at).to(tl.float32) * factor
    tl.store(out + at, tl.sqrt_rn(total))


@triton.jit
def divide(x, out, COUNT: tl.constexpr):
    """What is to be written `tl.div_rn(v, 7.0)`."""
    at = tl.arange(0, COUNT)
    tl.store(out + at, tl.load(x + at) / 7.0)


@triton.jit
def outside(out):
    """An address that no memory has."""
    tl.store(out + 1, 1.0)


@triton.jit
def spill(x, out, COUNT: tl.constexpr):
    """More live values than a thread has registers: all of them wait for their sum."""
    at = tl.arange(0, COUNT)
    v = tl.load(x + at)
    tl.store(out + at, v - tl.sum(v))


def variants() -> list[Variant]:
    const = "constexpr"
    tile = {"ROWS": const, "BLOCK": const}
    pair = {"x": "*fp32", "out": "*fp32"}
    quantised = {"x": "*fp32", "rest": "*fp32", "codes": "*u8", "words": "*i64", "n": "i64"}
    sizes = {"ROWS": ROWS, "BLOCK": BLOCK}
    count = {"COUNT": COUNT}
    summed = {"addresses": "*i64", "out": "*fp32", "count": "i32", "factor": "fp32"}
    counted = {"x": "*fp32", "counts": "*i32", "sums": "*i32", "COUNT": const}
    rotated = {"BLOCK": BLOCK, "COUNT": COUNT}
    return [
        Variant("quantise", quantise, quantised | tile, sizes),
        Variant("quantise_8", quantise, quantised | tile, sizes, 8),
        Variant("rotate", rotate, pair | {"BLOCK": const, "COUNT": const}, rotated),
        Variant("count_bytes", count_bytes, counted, count),
        Variant("add_up", add_up, summed | {"COUNT": const}, count),
        Variant("divide", divide, pair | {"COUNT": const}, count),
        Variant("outside", outside, {"out": "*fp32"}, {}),
        Variant("spill", spill, pair | {"COUNT": const}, {"COUNT": 16384}, 1),
    ]
