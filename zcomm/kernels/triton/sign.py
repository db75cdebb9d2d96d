"""sign: one bit per element and the block's mean magnitude.

s = bf16(tree(|v|) / m)    d = +-s
"""

from __future__ import annotations

import triton
import triton.language as tl

from zcomm.kernels.triton.bits import (
    BF16_MAX,
    SCALE_MIN,
    bf16_round,
    bf16_value,
    bits,
    from_bits,
    magnitude,
)
from zcomm.kernels.triton.block import tree

# From 2^100 on the sum of a block could overflow, so it is taken 2^64 times smaller.
LARGE: tl.constexpr = tl.constexpr(227 << 23)
DOWN: tl.constexpr = tl.constexpr(2.0**-64)
UP: tl.constexpr = tl.constexpr(2.0**64)


@triton.jit
def quantise(
    v: tl.tensor, peak: tl.tensor, m: tl.tensor, ROWS: tl.constexpr, LOG2: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Scales and codes of finite blocks of m elements, and what the codes leave out."""
    large = peak >= LARGE
    sizes = from_bits(magnitude(v)) * tl.where(large, DOWN, 1.0)[:, None]
    mean = tl.div_rn(tree(sizes, ROWS, LOG2), tl.maximum(m, 1).to(tl.float32))
    scale = tl.minimum(bf16_round(tl.where(large, mean * UP, mean)), BF16_MAX)
    scale = tl.where(scale < SCALE_MIN, 0, scale)
    codes = tl.where(scale[:, None] == 0, 0, (bits(v) >> 31) & 1)
    return scale, codes, v - from_bits(bits(bf16_value(scale))[:, None] | (codes << 31))


@triton.jit
def value(codes: tl.tensor) -> tl.tensor:
    return (1 - 2 * codes).to(tl.float32)
