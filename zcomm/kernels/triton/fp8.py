"""fp8: an E4M3 number per element.

s = min(bf16(absmax / 448), cap)    code = E4M3(v / s)    d = value(code) * s (exact)
"""

from __future__ import annotations

import triton
import triton.language as tl

from zcomm.kernels.triton.bits import bf16_value, bits, from_bits, magnitude
from zcomm.kernels.triton.uniform import absmax_scale, inverse

MOST: tl.constexpr = tl.constexpr(448)
CAP: tl.constexpr = tl.constexpr(0x7B12)
MAX_CODE: tl.constexpr = tl.constexpr(0x7E)
LEAST_NORMAL: tl.constexpr = tl.constexpr(0x3C800000)  # bits(2^-6)
SUBNORMAL_MAGIC: tl.constexpr = tl.constexpr(16384.0)  # its ulp is the subnormal step, 2^-9
MAGIC_BITS: tl.constexpr = tl.constexpr(0x46800000)
REBIAS: tl.constexpr = tl.constexpr(120 << 3)  # 127 - 7, above three mantissa bits
VALUE_SCALE: tl.constexpr = tl.constexpr(2.0**120)


@triton.jit
def e4m3(x: tl.tensor) -> tl.tensor:
    """Nearest even, at most 448."""
    u = magnitude(x)
    normal = ((u + 0x7FFFF + ((u >> 20) & 1)) >> 20) - REBIAS
    small = bits(from_bits(tl.minimum(u, LEAST_NORMAL)) + SUBNORMAL_MAGIC) - MAGIC_BITS
    code = tl.minimum(tl.where(u < LEAST_NORMAL, small, normal), MAX_CODE)
    return code | ((bits(x) >> 24) & 0x80)


@triton.jit
def value(codes: tl.tensor) -> tl.tensor:
    size = from_bits((codes & 0x7F) << 20) * VALUE_SCALE
    return from_bits(bits(size) | ((codes & 0x80) << 24))


@triton.jit
def quantise(v: tl.tensor, peak: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Finite blocks' scales, codes, and what the codes leave out."""
    scale = absmax_scale(peak, MOST, CAP)
    # A zero block's codes are 0: none for the sign of a zero.
    codes = tl.where(scale[:, None] == 0, 0, e4m3(v * inverse(scale)[:, None]))
    return scale, codes, v - value(codes) * bf16_value(scale)[:, None]


@triton.jit
def unused(codes: tl.tensor) -> tl.tensor:
    return (codes & 0x7F) == 0x7F
