"""none, bf16 and fp16: values unchanged or cast, in rows of 128, the block of int8 storage.

A frame without elements has a tile of `none`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zcomm.kernels.triton.arguments import DECODE_ARGUMENTS, ENCODE_ARGUMENTS
from zcomm.kernels.triton.bits import (
    INF,
    bf16_saturate,
    bf16_value,
    bits,
    canonical,
    fp16_saturate,
    fp16_value,
    from_bits,
    magnitude,
    negative_zeros,
)
from zcomm.kernels.triton.frame import (
    FAULT_PADDING,
    NO_FAULT,
    PARTS,
    add_part,
    add_parts,
    finish_decode,
    finish_encode,
    part,
    refuse_body,
    wire_at,
)
from zcomm.kernels.triton.padding import check_padding
from zcomm.kernels.triton.tile import (
    CHECKSUM,
    FRAME,
    OFFSET,
    SECTION,
    TILES,
    USED,
    elements_left,
    ints_at,
    places,
    section_byte,
    segment_at,
    shorts_at,
    store_zeros,
    tile_at,
)
from zcomm.kernels.triton.values import (
    INT8,
    clear_residual_paddings,
    load_rows,
    residual_kind,
    residual_value,
    store_residual,
)
from zcomm.wire.header import CODEC_IDS

NONE: tl.constexpr = tl.constexpr(CODEC_IDS["none"])
BF16: tl.constexpr = tl.constexpr(CODEC_IDS["bf16"])


@triton.jit
def code(v: tl.tensor, CODEC: tl.constexpr) -> tl.tensor:
    if CODEC == NONE:
        return bits(canonical(v))
    elif CODEC == BF16:
        return bf16_saturate(v)
    else:
        return fp16_saturate(v)


@triton.jit
def value(codes: tl.tensor, CODEC: tl.constexpr) -> tl.tensor:
    if CODEC == NONE:
        return from_bits(codes)
    elif CODEC == BF16:
        return bf16_value(codes)
    else:
        return fp16_value(codes)


@triton.jit
def write_residual(
    residual: tl.tensor,
    kind: tl.tensor,
    row: tl.tensor,
    segment: tl.tensor,
    first: tl.tensor,
    at: tl.tensor,
    valid: tl.tensor,
    m: tl.tensor,
    raw: tl.tensor,
    old: tl.tensor,
    kept: tl.tensor,
    e: tl.tensor,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> None:
    """In int8 storage, `kept` elements are stored again with the value that was read."""
    if kind == INT8:
        e = tl.where(kept, residual_value(raw, old, kind), e)
        kept = kept & (at < 0)
    store_residual(residual, kind, row, segment, first, at, valid, m, raw, old, kept, e, ROWS, LOG2)


@triton.jit
def encode_rows(
    tables: tl.tensor,
    scratch: tl.tensor,
    grad: tl.tensor,
    wire: tl.tensor,
    residual_in: tl.tensor,
    residual_out: tl.tensor,
    prescale: tl.tensor,
    flags: tl.tensor,
    segment: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    CODEC: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> tl.tensor:
    """Encodes the rows from element `first` on. Returns their checksum."""
    NBYTES: tl.constexpr = 4 if CODEC == NONE else 2
    kind = residual_kind(tables, scratch, residual_in, segment, flags)
    v, at, valid, m, raw, old = load_rows(
        grad, residual_in, prescale, flags, row, segment, kind, first, ROWS, LOG2
    )
    codes = code(v, CODEC)
    e = v - value(codes, CODEC)
    kept = magnitude(v) >= INF
    write_residual(
        residual_out, kind, row, segment, first, at, valid, m, raw, old, kept, e, ROWS, LOG2
    )
    address = wire + tl.load(row + SECTION) + first * NBYTES
    if NBYTES == 4:
        tl.store(ints_at(address) + at, codes, mask=valid)
    else:
        tl.store(shorts_at(address) + at, codes.to(tl.uint16), mask=valid)
    pieces = tl.where(valid, codes.to(tl.int64) & 0xFFFFFFFF, 0)
    return tl.sum(part(pieces, section_byte(row, 0, first * NBYTES) + at * NBYTES))


@triton.jit(do_not_specialize=ENCODE_ARGUMENTS)
def encode_plain(
    tables: tl.int64,
    tiles: tl.int64,
    scratch: tl.int64,
    grad: tl.int64,
    wire: tl.int64,
    residual_in: tl.int64,
    residual_out: tl.int64,
    prescale: tl.int64,
    flags: tl.int64,
    CODEC: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> None:
    segment, tile = tile_at(tiles)
    frame, sum = tile, tile * 0
    if segment >= 0:
        row = segment_at(tables, segment)
        frame = tl.load(row + FRAME)
        for step in range(STEPS):
            first = (tile * STEPS + step) * (ROWS << LOG2)
            sum += encode_rows(
                tables, scratch, grad, wire, residual_in, residual_out, prescale, flags, segment,
                row, first, CODEC, ROWS, LOG2,
            )  # fmt: skip
        if tile + 1 == tl.load(row + TILES):
            kind = residual_kind(tables, scratch, residual_in, segment, flags)
            store_zeros(wire + tl.load(row + SECTION), tl.load(row + USED))
            clear_residual_paddings(residual_out, kind, row, segment)
    finish_encode(tables, scratch, wire, frame, sum, flags & CHECKSUM)


@triton.jit
def decode_rows(
    tables: tl.tensor,
    scratch: tl.tensor,
    wires: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    out: tl.tensor,
    fault: tl.tensor,
    verify: tl.tensor,
    segment: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    ends: tl.tensor,
    parts: tl.tensor,
    CODEC: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> tl.tensor:
    """Decodes the rows from element `first` on, the segment's last ones if it `ends` there.
    Returns the wires' checksums with their parts added."""
    NBYTES: tl.constexpr = 4 if CODEC == NONE else 2
    left = elements_left(row, first, ROWS << LOG2)
    at = places(ROWS, 1 << LOG2)
    place = section_byte(row, 0, first * NBYTES) + at * NBYTES
    total = negative_zeros([ROWS, 1 << LOG2])  # -0 + x is x
    for w in range(count):
        wire = wire_at(wires, stride, w)
        address = wire + tl.load(row + SECTION) + first * NBYTES
        if NBYTES == 4:
            codes = tl.load(ints_at(address) + at, mask=at < left, other=0)
        else:
            codes = tl.load(shorts_at(address) + at, mask=at < left, other=0).to(tl.int32)
        sum = tl.sum(part(codes.to(tl.int64) & 0xFFFFFFFF, place))
        if ends:
            nonzero, more = check_padding(row, wire, 0)
            refuse_body(fault, w, segment, tl.where(nonzero, FAULT_PADDING, NO_FAULT))
            sum += more
        parts = add_part(tables, scratch, tl.load(row + FRAME), w, sum, parts, verify)
        total += value(codes, CODEC)
    to = ints_at(out + (tl.load(row + OFFSET) + first) * 4)
    tl.store(to + at, bits(canonical(total)), mask=at < left)
    return parts


@triton.jit(do_not_specialize=DECODE_ARGUMENTS)
def decode_plain(
    tables: tl.int64,
    tiles: tl.int64,
    scratch: tl.int64,
    wires: tl.int64,
    stride: tl.int64,
    count: tl.int64,
    out: tl.int64,
    fault: tl.int64,
    verify: tl.int64,
    CODEC: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> None:
    segment, tile = tile_at(tiles)
    frame = tile
    if segment >= 0:
        row = segment_at(tables, segment)
        frame = tl.load(row + FRAME)
        parts = tl.zeros([PARTS], tl.int64)
        for step in range(STEPS):
            first = (tile * STEPS + step) * (ROWS << LOG2)
            ends = (tile + 1 == tl.load(row + TILES)) & (step == STEPS - 1)
            parts = decode_rows(
                tables, scratch, wires, stride, count, out, fault, verify, segment, row, first,
                ends, parts, CODEC, ROWS, LOG2,
            )  # fmt: skip
        add_parts(tables, scratch, frame, count, parts, verify)
    finish_decode(tables, scratch, wires, stride, count, frame, fault, verify)
