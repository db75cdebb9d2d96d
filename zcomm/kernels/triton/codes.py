"""Codes on the wire: a tile's [ROWS, BLOCK] codes as words of 32 bits, or as bytes for lm3.

Code i of a block takes bits i * WIDTH ... of its block's string, and a block's string begins at a
word. What follows the last block's codes is 0 up to the end of the section's padding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zcomm.kernels.triton.frame import part
from zcomm.kernels.triton.tile import (
    SECTION,
    bytes_at,
    ints_at,
    padded_left,
    places,
    section_byte,
    shorts_at,
)


@triton.jit
def pack(
    codes: tl.tensor,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> tl.tensor:
    """GROUP neighboring codes in one int32."""
    grouped = tl.reshape(codes, (ROWS, (1 << LOG2) // GROUP, GROUP))
    shifts = tl.reshape(tl.arange(0, GROUP) * WIDTH, (1, 1, GROUP))
    return tl.sum(grouped << shifts, 2)


@triton.jit
def unpack(
    packed: tl.tensor,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> tl.tensor:
    shifts = tl.reshape(tl.arange(0, GROUP) * WIDTH, (1, 1, GROUP))
    grouped = (tl.expand_dims(packed, 2) >> shifts) & ((1 << WIDTH) - 1)
    return tl.reshape(grouped, (ROWS, 1 << LOG2))


@triton.jit
def store_codes(
    row: tl.tensor,
    wire: tl.tensor,
    first: tl.tensor,
    codes: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> tl.tensor:
    """Writes the codes of the tile that begins at element `first`; returns their checksum."""
    GROUP: tl.constexpr = 8 if WIDTH == 3 else 32 // WIDTH
    packed = pack(codes, WIDTH, GROUP, ROWS, LOG2)
    at = places(ROWS, (1 << LOG2) // GROUP)
    begin = first * WIDTH // 8
    address = wire + tl.load(row + SECTION + 1) + begin
    place = section_byte(row, 1, begin)
    left = padded_left(row, 1, begin, ROWS << LOG2)
    if WIDTH == 3:
        sums = tl.zeros([ROWS, (1 << LOG2) // GROUP], tl.int64)
        for i in tl.static_range(3):
            byte = at * 3 + i
            piece = tl.where(byte < left, (packed >> (8 * i)) & 0xFF, 0)
            tl.store(bytes_at(address) + byte, piece.to(tl.uint8), mask=byte < left)
            sums += part(piece.to(tl.int64), place + byte)
        return tl.sum(sums)
    else:
        tl.store(ints_at(address) + at, packed, mask=at * 4 < left)
        pieces = tl.where(at * 4 < left, packed.to(tl.int64) & 0xFFFFFFFF, 0)
        return tl.sum(part(pieces, place + at * 4))


@triton.jit
def load_codes(
    row: tl.tensor,
    wire: tl.tensor,
    first: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The codes of the tile that begins at element `first`, and their checksum."""
    GROUP: tl.constexpr = 8 if WIDTH == 3 else 32 // WIDTH
    at = places(ROWS, (1 << LOG2) // GROUP)
    begin = first * WIDTH // 8
    address = wire + tl.load(row + SECTION + 1) + begin
    place = section_byte(row, 1, begin)
    left = padded_left(row, 1, begin, ROWS << LOG2)
    if WIDTH == 3:
        packed = at * 0
        sums = tl.zeros([ROWS, (1 << LOG2) // GROUP], tl.int64)
        for i in tl.static_range(3):
            byte = at * 3 + i
            piece = tl.load(bytes_at(address) + byte, mask=byte < left, other=0).to(tl.int32)
            packed |= piece << (8 * i)
            sums += part(piece.to(tl.int64), place + byte)
        return unpack(packed, WIDTH, GROUP, ROWS, LOG2), tl.sum(sums)
    else:
        packed = tl.load(ints_at(address) + at, mask=at * 4 < left, other=0)
        sums = part(packed.to(tl.int64) & 0xFFFFFFFF, place + at * 4)
        return unpack(packed, WIDTH, GROUP, ROWS, LOG2), tl.sum(sums)


@triton.jit
def store_scales(
    row: tl.tensor,
    wire: tl.tensor,
    first: tl.tensor,
    scale: tl.tensor,
    m: tl.tensor,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> tl.tensor:
    """Writes the scales of blocks that have elements; returns their checksum."""
    begin = (first >> LOG2) * 2
    at = tl.arange(0, ROWS)
    address = wire + tl.load(row + SECTION) + begin
    tl.store(shorts_at(address) + at, scale.to(tl.uint16), mask=m > 0)
    pieces = tl.where(m > 0, scale, 0).to(tl.int64)
    return tl.sum(part(pieces, section_byte(row, 0, begin) + at * 2))


@triton.jit
def load_scales(
    row: tl.tensor,
    wire: tl.tensor,
    first: tl.tensor,
    m: tl.tensor,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The scales of the tile's blocks, 0 past the segment's end, and their checksum."""
    begin = (first >> LOG2) * 2
    at = tl.arange(0, ROWS)
    address = wire + tl.load(row + SECTION) + begin
    scale = tl.load(shorts_at(address) + at, mask=m > 0, other=0).to(tl.int32)
    return scale, tl.sum(part(scale.to(tl.int64), section_byte(row, 0, begin) + at * 2))
