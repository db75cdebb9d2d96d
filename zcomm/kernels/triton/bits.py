"""Bits of floats, as csrc/codec/float.h has them: integer conversions round the same everywhere.

bf16 and fp16 patterns travel as int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

INF: tl.constexpr = tl.constexpr(0x7F800000)
ABS: tl.constexpr = tl.constexpr(0x7FFFFFFF)
NAN: tl.constexpr = tl.constexpr(0x7FC00000)
SIGN_BIT: tl.constexpr = tl.constexpr(-0x80000000)
BF16_MAX: tl.constexpr = tl.constexpr(0x7F7F)
BF16_NAN: tl.constexpr = tl.constexpr(0x7FC0)
FP16_MAX: tl.constexpr = tl.constexpr(0x7BFF)
FP16_NAN: tl.constexpr = tl.constexpr(0x7E00)
SCALE_MIN: tl.constexpr = tl.constexpr(0x0080)


@triton.jit
def bits(x: tl.tensor) -> tl.tensor:
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(u: tl.tensor) -> tl.tensor:
    return u.to(tl.float32, bitcast=True)


@triton.jit
def negative_zeros(shape: tl.constexpr) -> tl.tensor:
    """-0. Some of Triton's compilers turn a literal -0.0 into 0."""
    return from_bits(tl.full(shape, SIGN_BIT, tl.int32))


@triton.jit
def magnitude(x: tl.tensor) -> tl.tensor:
    return bits(x) & ABS


@triton.jit
def pow2_biased(e: tl.tensor) -> tl.tensor:
    """2^(e - 127), for e of 1 to 254."""
    return from_bits(e << 23)


@triton.jit
def canonical(x: tl.tensor) -> tl.tensor:
    return from_bits(tl.where(magnitude(x) > INF, NAN, bits(x)))


@triton.jit
def bf16_value(pattern: tl.tensor) -> tl.tensor:
    return from_bits(pattern << 16)


@triton.jit
def bf16_round(x: tl.tensor) -> tl.tensor:
    """Nearest even, of x >= 0; overflows to infinity."""
    u = bits(x)
    return (u + 0x7FFF + ((u >> 16) & 1)) >> 16


@triton.jit
def bf16_saturate(x: tl.tensor) -> tl.tensor:
    """Nearest even; a finite x stays finite, and NaN is BF16_NAN."""
    size = tl.minimum(magnitude(x), INF)
    rounded = (size + 0x7FFF + ((size >> 16) & 1)) >> 16
    rounded = tl.where(size < INF, tl.minimum(rounded, BF16_MAX), rounded)
    signed = rounded | ((bits(x) >> 16) & 0x8000)
    return tl.where(magnitude(x) > INF, BF16_NAN, signed)


@triton.jit
def fp16_value(pattern: tl.tensor) -> tl.tensor:
    sign = (pattern & 0x8000) << 16
    size = pattern & 0x7FFF
    # Shifted into place the number is 2^112 too small; the product is exact.
    scaled = from_bits(size << 13) * 5192296858534827628530496329220096.0
    special = INF | ((size & 0x3FF) << 13)
    return from_bits(sign | tl.where(size >= 0x7C00, special, bits(scaled)))


@triton.jit
def fp16_saturate(x: tl.tensor) -> tl.tensor:
    """Nearest even; a finite x stays finite, and NaN is FP16_NAN."""
    size = magnitude(x)
    # Below 2^-14 adding 0.5 rounds to multiples of 2^-24.
    small = bits(from_bits(tl.minimum(size, 0x38800000)) + 0.5) - 0x3F000000
    middle = tl.minimum(size, 0x477FE000)  # 65504
    normal = (middle + 0xFFF + ((middle >> 13) & 1) - 0x38000000) >> 13
    rounded = tl.where(size < 0x38800000, small, tl.minimum(normal, FP16_MAX))
    rounded = tl.where(size == INF, 0x7C00, rounded)
    signed = rounded | ((bits(x) >> 16) & 0x8000)
    return tl.where(size > INF, FP16_NAN, signed)
