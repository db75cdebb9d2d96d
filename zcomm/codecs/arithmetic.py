"""The arithmetic of the wire format in plain torch: every operation rounds once.

Blocks are the rows of a tensor [blocks, elements]. bf16 patterns are held as int32, because
rounding is an integer operation and torch has little uint16 arithmetic.
"""

import torch
from torch import Tensor

MAGNITUDE = 0x7FFFFFFF
FP32_INF = 0x7F800000
FP32_NAN = 0x7FC00000
FP32_MIN_NORMAL = 0x00800000
BF16_MIN_NORMAL = 0x0080
BF16_MAX = 0x7F7F
BF16_INF = 0x7F80
BF16_NAN = 0x7FC0


def bits(x: Tensor) -> Tensor:
    """The fp32 pattern, as int32."""
    return x.view(torch.int32)


def magnitude(x: Tensor) -> Tensor:
    """bits(x) without the sign: an int32 that grows with |x|; >= FP32_INF where not finite."""
    return bits(x) & MAGNITUDE


def constant(x: Tensor, value: float) -> Tensor:
    """`value` as a tensor on x's device: some devices divide by a Python number by multiplying."""
    return torch.tensor(value, dtype=torch.float32, device=x.device)


def bf16_bits(x: Tensor) -> Tensor:
    """bf16(x) as int32 patterns; a finite x never becomes an infinity, a NaN becomes 0x7fc0."""
    size = magnitude(x)
    # Clamped so the rounding below cannot overflow int32.
    clamped = size.clamp_max(FP32_INF)
    rounded = (clamped + 0x7FFF + ((clamped >> 16) & 1)) >> 16
    rounded = torch.where(size < FP32_INF, rounded.clamp_max(BF16_MAX), rounded)
    signed = rounded | ((bits(x) >> 16) & 0x8000)
    return torch.where(size > FP32_INF, BF16_NAN, signed)


def bf16_value(pattern: Tensor) -> Tensor:
    """The fp32 value of int32 bf16 patterns."""
    return (pattern.to(torch.int32) << 16).view(torch.float32)


def power_of_two(biased_exponent: Tensor) -> Tensor:
    """2^(e - 127) for int32 e in 1..254; +0 for 0."""
    return (biased_exponent << 23).view(torch.float32)


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded root. fp32 torch.sqrt is not: it may use a vector math library."""
    return torch.sqrt(x.to(torch.float64)).to(torch.float32)


def canonical_nan(x: Tensor) -> Tensor:
    """x with every NaN replaced by 0x7fc00000."""
    nan = magnitude(x) > FP32_INF
    return torch.where(nan, FP32_NAN, bits(x)).view(torch.float32)


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def pad_columns(t: Tensor, columns: int) -> Tensor:
    """Each row padded with zeros to `columns`."""
    missing = columns - t.shape[1]
    return torch.nn.functional.pad(t, (0, missing)) if missing else t


def tree(t: Tensor) -> Tensor:
    """The sum of each row by halving: t_i + t_{i+b/2}, then b/4, ..., 1."""
    t = pad_columns(t, next_power_of_two(t.shape[1]))
    while t.shape[1] > 1:
        half = t.shape[1] // 2
        t = t[:, :half] + t[:, half:]
    return t[:, 0]


def hadamard(t: Tensor) -> Tensor:
    """The unnormalized Hadamard transform of each row, strides 1, 2, ..., b/2."""
    blocks, size = t.shape
    stride = 1
    while stride < size:
        low, high = t.view(blocks, size // (2 * stride), 2, stride).unbind(2)
        t = torch.stack((low + high, low - high), 2).view(blocks, size)
        stride *= 2
    return t
