"""What is encoded, v = gradient * prescale + residual, and the new residual.

A residual's stored bits are read unchanged (`raw`), so that a kept residual keeps its bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zcomm.kernels.triton.bits import (
    bf16_saturate,
    bf16_value,
    bits,
    fp16_value,
    from_bits,
)
from zcomm.kernels.triton.block import absmax
from zcomm.kernels.triton.tile import (
    FRAMES,
    GRAD_BF16,
    GRAD_FP32,
    KEEP_IDLE,
    OFFSET,
    RESIDUAL_CODES,
    RESIDUAL_SHIFT,
    RESIDUAL_USED,
    block_lengths,
    bytes_at,
    elements_left,
    ints_at,
    places,
    shorts_at,
    store_zeros,
    words_at,
)
from zcomm.kernels.triton.uniform import int8_quantise

NO_RESIDUAL: tl.constexpr = tl.constexpr(0)
FP32: tl.constexpr = tl.constexpr(1)
BF16: tl.constexpr = tl.constexpr(2)
INT8: tl.constexpr = tl.constexpr(3)


@triton.jit
def load_gradient(
    grad: tl.tensor, flags: tl.tensor, first: tl.tensor, at: tl.tensor, valid: tl.tensor
) -> tl.tensor:
    """Elements first + at of the gradient, exactly, as fp32."""
    kind = flags & 3
    if kind == GRAD_FP32:
        u = tl.load(ints_at(grad + first * 4) + at, mask=valid, other=0)
    else:
        u = tl.load(shorts_at(grad + first * 2) + at, mask=valid, other=0).to(tl.int32)
        if kind == GRAD_BF16:
            u = u << 16
        else:
            u = bits(fp16_value(u))
    return from_bits(u)


@triton.jit
def residual_kind(
    tables: tl.tensor,
    scratch: tl.tensor,
    residual_in: tl.tensor,
    segment: tl.tensor,
    flags: tl.tensor,
) -> tl.tensor:
    """The residual's storage, or NO_RESIDUAL if the segment has none or is idle and keeps it."""
    kind = (flags >> RESIDUAL_SHIFT) & 3
    if kind != NO_RESIDUAL:
        if tl.load(words_at(residual_in) + segment) == 0:
            kind = kind * 0
        if flags & KEEP_IDLE:
            idle = words_at(scratch) + 2 * tl.load(words_at(tables) + FRAMES)
            if tl.load(idle + segment) != 0:
                kind = kind * 0
    return kind


@triton.jit
def load_residual(
    residual: tl.tensor,
    kind: tl.tensor,
    row: tl.tensor,
    segment: tl.tensor,
    first: tl.tensor,
    at: tl.tensor,
    valid: tl.tensor,
    m: tl.tensor,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The stored bits of each element, and of each block's scale."""
    raw, scale = at * 0, m * 0
    if kind != NO_RESIDUAL:
        address = tl.load(words_at(residual) + segment)
        if kind == FP32:
            raw = tl.load(ints_at(address + first * 4) + at, mask=valid, other=0)
        elif kind == BF16:
            raw = tl.load(shorts_at(address + first * 2) + at, mask=valid, other=0).to(tl.int32)
        else:
            codes = address + tl.load(row + RESIDUAL_CODES) + first
            raw = tl.load(bytes_at(codes) + at, mask=valid, other=0).to(tl.int32)
            scales = shorts_at(address + (first >> LOG2) * 2) + tl.arange(0, ROWS)
            scale = tl.load(scales, mask=m > 0, other=0).to(tl.int32)
    return raw, scale


@triton.jit
def residual_value(raw: tl.tensor, scale: tl.tensor, kind: tl.tensor) -> tl.tensor:
    value = from_bits(raw)
    if kind == BF16:
        value = bf16_value(raw)
    elif kind == INT8:
        value = ((raw ^ 128) - 128).to(tl.float32) * bf16_value(scale)[:, None]
    return value


@triton.jit
def load_rows(
    grad: tl.tensor,
    residual_in: tl.tensor,
    prescale: tl.tensor,
    flags: tl.tensor,
    row: tl.tensor,
    segment: tl.tensor,
    kind: tl.tensor,
    first: tl.tensor,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """How every encode begins: v from element `first` on, 0 past the segment's end.

    Then the elements' places, which of them exist, the lengths of blocks, and the stored residual.
    `prescale` is the bits of an fp32 number.
    """
    left = elements_left(row, first, ROWS << LOG2)
    at = places(ROWS, 1 << LOG2)
    valid, m = at < left, block_lengths(left, ROWS, LOG2)
    raw, old = load_residual(residual_in, kind, row, segment, first, at, valid, m, ROWS, LOG2)
    g = load_gradient(grad, flags, tl.load(row + OFFSET) + first, at, valid)
    v = g * from_bits(prescale.to(tl.int32))
    if kind != NO_RESIDUAL:
        v = v + residual_value(raw, old, kind)
    return tl.where(valid, v, 0.0), at, valid, m, raw, old


@triton.jit
def store_residual(
    residual: tl.tensor,
    kind: tl.tensor,
    row: tl.tensor,
    segment: tl.tensor,
    first: tl.tensor,
    at: tl.tensor,
    valid: tl.tensor,
    m: tl.tensor,
    raw: tl.tensor,
    old_scale: tl.tensor,
    kept: tl.tensor,
    e: tl.tensor,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> None:
    """Writes e, or the old bits where `kept`. int8 storage keeps or replaces whole blocks."""
    if kind != NO_RESIDUAL:
        address = tl.load(words_at(residual) + segment)
        if kind == FP32:
            new = tl.where(kept, raw, bits(e))
            tl.store(ints_at(address + first * 4) + at, new, mask=valid)
        elif kind == BF16:
            new = tl.where(kept, raw, bf16_saturate(e))
            tl.store(shorts_at(address + first * 2) + at, new.to(tl.uint16), mask=valid)
        else:
            e = tl.where(valid, e, 0.0)
            scale, codes = int8_quantise(e, absmax(e))
            new = tl.where(kept, raw, codes)
            to = address + tl.load(row + RESIDUAL_CODES) + first
            # Several lanes may have read the scale that one of them now overwrites.
            tl.debug_barrier()
            tl.store(bytes_at(to) + at, new.to(tl.uint8), mask=valid)
            scale = tl.where(tl.max(kept.to(tl.int32), 1) != 0, old_scale, scale)
            scales = shorts_at(address + (first >> LOG2) * 2) + tl.arange(0, ROWS)
            tl.store(scales, scale.to(tl.uint16), mask=m > 0)


@triton.jit
def clear_residual_paddings(
    residual: tl.tensor, kind: tl.tensor, row: tl.tensor, segment: tl.tensor
) -> None:
    if kind == INT8:
        address = tl.load(words_at(residual) + segment)
        store_zeros(address, tl.load(row + RESIDUAL_USED))
        codes = address + tl.load(row + RESIDUAL_CODES)
        store_zeros(codes, tl.load(row + RESIDUAL_USED + 1))
