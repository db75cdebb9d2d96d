"""lm4, lm3, lm2: a randomized Hadamard transform and a Lloyd-Max quantizer.

y = H(sign * v * 2^-e)    t = floor(y * (48 / sqrt(tree(y*y) / b)))    code: t's cell
q = level[code]           S = bf16(tree(y*q) / tree(q*q) / b * 2^e)    d = sign * H(q * S)
"""

from __future__ import annotations

import triton
import triton.language as tl

from zcomm.kernels.triton.bits import (
    ABS,
    INF,
    SCALE_MIN,
    bf16_round,
    bf16_value,
    bits,
    from_bits,
    magnitude,
    pow2_biased,
)
from zcomm.kernels.triton.block import hadamard, tree
from zcomm.kernels.triton.tile import ints_at
from zcomm.wire import lm_tables

STEPS: tl.constexpr = tl.constexpr(lm_tables.STEPS)
# By width: where cells end, and the levels of positive ones.
THRESHOLDS: tl.constexpr = tl.constexpr(
    tuple(lm_tables.THRESHOLDS.get(width, ()) for width in range(5))
)
LEVELS: tl.constexpr = tl.constexpr(
    tuple(lm_tables.LEVELS.get(width, ())[1 << width >> 1 :] for width in range(5))
)
# From this biased exponent on, the scale is made 2^6 smaller so that H(q * S) stays finite.
LARGE: tl.constexpr = tl.constexpr(249)


@triton.jit
def sizes(m: tl.tensor, LOG2: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The least power of two that is >= m, of each block, and its exponent."""
    size, exponent = m * 0 + 1, m * 0
    for i in tl.static_range(LOG2):
        size = tl.where(m > (1 << i), 2 << i, size)
        exponent = tl.where(m > (1 << i), i + 1, exponent)
    return size, exponent


@triton.jit
def flips(tables: tl.tensor, LOG2: tl.constexpr) -> tl.tensor:
    """The sign bit that multiplies each element of a block, [1, block]."""
    i = tl.arange(0, 1 << LOG2)
    words = tl.load(ints_at(tables) + (i >> 5))
    return ((words >> (i & 31)) << 31)[None, :]


@triton.jit
def flip(x: tl.tensor, sign: tl.tensor) -> tl.tensor:
    return from_bits(bits(x) ^ sign)


@triton.jit
def cells(steps: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Codes, which count up from the lowest level. A NaN, of a zero block, is not converted."""
    clamped = tl.where(steps > -128.0, tl.minimum(steps, 127.0), -128.0)
    # Rounded down by hand: compiled, tl.floor takes subnormal numbers for 0.
    cut = clamped.to(tl.int32)
    t = cut - (cut.to(tl.float32) > clamped).to(tl.int32)
    size = tl.where(t < 0, -1 - t, t)
    cell = t * 0
    for i in tl.static_range((1 << WIDTH) // 2 - 1):
        cell += (size >= THRESHOLDS[WIDTH][i]).to(tl.int32)
    HALF: tl.constexpr = 1 << (WIDTH - 1)
    return tl.where(t < 0, HALF - 1 - cell, HALF + cell)


@triton.jit
def value(codes: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    HALF: tl.constexpr = 1 << (WIDTH - 1)
    cell = tl.where(codes < HALF, HALF - 1 - codes, codes - HALF)
    level = tl.full(codes.shape, LEVELS[WIDTH][0], tl.float32)
    for i in tl.static_range(1, (1 << WIDTH) // 2):
        level = tl.where(cell >= i, LEVELS[WIDTH][i], level)
    return tl.where(codes < HALF, -level, level)


@triton.jit
def scale_of(
    yq: tl.tensor, qq: tl.tensor, exponent: tl.tensor, biased: tl.tensor, p: tl.tensor
) -> tl.tensor:
    up = pow2_biased(tl.where(biased >= LARGE, 248 - p, 254 - p))
    ratio = tl.div_rn(yq, qq) * pow2_biased(127 - exponent)
    scale = bf16_round(ratio * up)
    return tl.where((biased == 0) | (scale < SCALE_MIN), 0, scale)


@triton.jit
def quantise(
    tables: tl.tensor,
    v: tl.tensor,
    peak: tl.tensor,
    m: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Scales and codes of finite blocks of m elements, and what the codes leave out."""
    size, exponent = sizes(m, LOG2)
    sign = flips(tables, LOG2)
    biased = peak >> 23
    p = tl.maximum(254 - biased, 1)
    y = hadamard(flip(v * pow2_biased(p)[:, None], sign), size, ROWS, LOG2)
    mean = tree(y * y, ROWS, LOG2) * pow2_biased(127 - exponent)
    gain = tl.div_rn(tl.full(mean.shape, STEPS, tl.float32), tl.sqrt_rn(mean))
    sent = tl.arange(0, 1 << LOG2)[None, :] < size[:, None]
    codes = tl.where(sent, cells(y * gain[:, None], WIDTH), 0)
    q = tl.where(sent, value(codes, WIDTH), 0.0)
    yq, qq = tree(y * q, ROWS, LOG2), tree(q * q, ROWS, LOG2)
    scale = scale_of(yq, qq, exponent, biased, p)
    dead = scale[:, None] == 0
    d = flip(hadamard(q * bf16_value(scale)[:, None], size, ROWS, LOG2), sign)
    # A rotated zero may be -0, and the residual of a zero block is v, bit for bit.
    e = v - tl.where(dead, 0.0, d)
    # The residual of a large value stays finite.
    most = (bits(e) & ~ABS) | (INF - 1)
    return scale, tl.where(dead, 0, codes), from_bits(tl.where(magnitude(e) < INF, bits(e), most))


@triton.jit
def restore(
    tables: tl.tensor, total: tl.tensor, m: tl.tensor, ROWS: tl.constexpr, LOG2: tl.constexpr
) -> tl.tensor:
    """The sum over wires, back in the gradient's domain."""
    size, _ = sizes(m, LOG2)
    return flip(hadamard(total, size, ROWS, LOG2), flips(tables, LOG2))
