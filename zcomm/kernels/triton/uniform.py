"""int8 and int4: absmax, symmetric.

s = min(bf16(absmax / Q), cap)    code = clamp(rne(v / s), -Q, Q)    d = code * s (exact)
"""

from __future__ import annotations

import triton
import triton.language as tl

from zcomm.kernels.triton.bits import BF16_NAN, INF, SCALE_MIN, bf16_round, bf16_value, from_bits

INT8_MAX: tl.constexpr = tl.constexpr(127)
INT8_CAP: tl.constexpr = tl.constexpr(0x7C01)
INT4_MAX: tl.constexpr = tl.constexpr(7)
INT4_CAP: tl.constexpr = tl.constexpr(0x7E12)
# Adding and subtracting it rounds numbers below 2^22 to integers, halves to even.
ROUND: tl.constexpr = tl.constexpr(12582912.0)


@triton.jit
def absmax_scale(peak: tl.tensor, MOST: tl.constexpr, CAP: tl.constexpr) -> tl.tensor:
    """bf16(absmax / MOST), at most CAP; 0 for a zero block. `peak` is bits(absmax)."""
    ratio = tl.div_rn(from_bits(peak), tl.full(peak.shape, MOST, tl.float32))
    scale = tl.minimum(bf16_round(ratio), CAP)
    return tl.where(scale < SCALE_MIN, 0, scale)


@triton.jit
def inverse(scale: tl.tensor) -> tl.tensor:
    """1 / s, of a zero block 0."""
    s = bf16_value(tl.maximum(scale, SCALE_MIN))
    return tl.where(scale == 0, 0.0, tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s))


@triton.jit
def quantise(
    v: tl.tensor, peak: tl.tensor, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Finite blocks' scales, codes, and what the codes leave out."""
    MOST: tl.constexpr = INT8_MAX if WIDTH == 8 else INT4_MAX
    CAP: tl.constexpr = INT8_CAP if WIDTH == 8 else INT4_CAP
    scale = absmax_scale(peak, MOST, CAP)
    code = (v * inverse(scale)[:, None] + ROUND) - ROUND
    code = tl.minimum(tl.maximum(code, -1.0 * MOST), 1.0 * MOST)
    return scale, code.to(tl.int32) & ((1 << WIDTH) - 1), v - code * bf16_value(scale)[:, None]


@triton.jit
def int8_quantise(e: tl.tensor, peak: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The scales and codes of an int8 body; a block that is not finite is a NaN block."""
    finite = peak < INF
    scale, codes, _ = quantise(tl.where(finite[:, None], e, 0.0), tl.where(finite, peak, 0), 8)
    return tl.where(finite, scale, BF16_NAN), codes


@triton.jit
def value(codes: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    HALF: tl.constexpr = 1 << (WIDTH - 1)
    return ((codes ^ HALF) - HALF).to(tl.float32)


@triton.jit
def unused(codes: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Codes that do not occur: -128, -8."""
    return codes == (1 << (WIDTH - 1))
