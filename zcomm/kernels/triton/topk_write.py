"""topk's last launch: entries, counts and the residual, once it is known what is sent."""

from __future__ import annotations

import triton
import triton.language as tl

from zcomm.kernels.triton import plan
from zcomm.kernels.triton.arguments import ENCODE_ARGUMENTS
from zcomm.kernels.triton.bits import ABS, bf16_saturate, bf16_value, magnitude
from zcomm.kernels.triton.frame import finish_encode, part
from zcomm.kernels.triton.plain import write_residual
from zcomm.kernels.triton.tile import (
    CHECKSUM,
    FRAME,
    SECTION,
    TILES,
    USED,
    K,
    ints_at,
    own_tile,
    places,
    section_byte,
    shorts_at,
    store_zeros,
)
from zcomm.kernels.triton.topk import (
    DIGITS,
    KNOWN,
    NOT_FINITE,
    STRIP_WORDS,
    load_tile,
    strips_at,
    topk_at,
)
from zcomm.kernels.triton.values import clear_residual_paddings

RANGE: tl.constexpr = tl.constexpr(plan.TOPK_RANGE)


@triton.jit
def ranks(flags: tl.tensor, ROWS: tl.constexpr, LOG2: tl.constexpr) -> tl.tensor:
    """How many flags are set before each element, in the order of elements."""
    flat = tl.reshape(flags, (ROWS << LOG2,)).to(tl.int64)
    return tl.reshape(tl.cumsum(flat) - flat, (ROWS, 1 << LOG2))


@triton.jit
def write_entries(
    row: tl.tensor,
    wire: tl.tensor,
    first: tl.tensor,
    at: tl.tensor,
    sent: tl.tensor,
    entry: tl.tensor,
    values: tl.tensor,
) -> tl.tensor:
    """Writes offsets and values of sent elements, starting at `entry`. Returns their checksum."""
    offsets = (first % RANGE).to(tl.int32) + at
    to = shorts_at(wire + tl.load(row + SECTION + 1)) + entry
    tl.store(to, offsets.to(tl.uint16), mask=sent)
    to = shorts_at(wire + tl.load(row + SECTION + 2)) + entry
    tl.store(to, values.to(tl.uint16), mask=sent)
    sums = part(offsets.to(tl.int64), section_byte(row, 1, entry * 2))
    sums += part(values.to(tl.int64), section_byte(row, 2, entry * 2))
    return tl.sum(tl.where(sent, sums, 0))


@triton.jit
def clear_entries(row: tl.tensor, wire: tl.tensor, tile: tl.tensor, TILE: tl.constexpr) -> None:
    """Each tile of a segment that is not finite clears its share of the entries."""
    k, tiles = tl.load(row + K), tl.load(row + TILES)
    entry = k * tile // tiles + tl.arange(0, TILE)
    mine = entry < k * (tile + 1) // tiles
    zeros = tl.zeros([TILE], tl.uint16)
    tl.store(shorts_at(wire + tl.load(row + SECTION + 1)) + entry, zeros, mask=mine)
    tl.store(shorts_at(wire + tl.load(row + SECTION + 2)) + entry, zeros, mask=mine)


@triton.jit
def write_count(
    row: tl.tensor,
    wire: tl.tensor,
    strips: tl.tensor,
    tile: tl.tensor,
    not_finite: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The tile that begins a range writes the range's count. Returns its checksum."""
    PER_RANGE: tl.constexpr = RANGE // TILE
    sum = tile * 0
    if tile % PER_RANGE == 0:
        end = tl.load(row + K)
        if tile + PER_RANGE < tl.load(row + TILES):
            end = tl.load(strips + (tile + PER_RANGE) * STRIP_WORDS)
        count = end - tl.load(strips + tile * STRIP_WORDS)
        count = tl.where(not_finite != 0, 0xFFFFFFFF, count)
        place = tile // PER_RANGE
        tl.store(ints_at(wire + tl.load(row + SECTION)) + place, count.to(tl.int32))
        sum = part(count, section_byte(row, 0, place * 4))
    return sum


@triton.jit(do_not_specialize=ENCODE_ARGUMENTS)
def topk_write(
    tables: tl.int64,
    tiles: tl.int64,
    scratch: tl.int64,
    grad: tl.int64,
    wire: tl.int64,
    residual_in: tl.int64,
    residual_out: tl.int64,
    prescale: tl.int64,
    flags: tl.int64,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> None:
    segment, tile, row = own_tile(tables, tiles)
    first = tile * (ROWS << LOG2)
    topk, strips = topk_at(tables, scratch, row), strips_at(tables, scratch, row)
    not_finite = tl.load(topk + NOT_FINITE)
    # No magnitude exceeds this threshold, so nothing is sent.
    threshold = tl.where(not_finite != 0, ABS, tl.load(topk + KNOWN + 2 * DIGITS))
    v, valid, m, kind, raw, old = load_tile(
        tables, scratch, grad, residual_in, prescale, flags, row, segment, tile, ROWS, LOG2
    )
    at, u = places(ROWS, 1 << LOG2), magnitude(v)
    equal = valid & (u == threshold)
    ties = tl.where(not_finite != 0, 0, tl.load(strips + tile * STRIP_WORDS + 1))
    sent = (valid & (u > threshold)) | (equal & (ranks(equal, ROWS, LOG2) < ties))
    entry = tl.load(strips + tile * STRIP_WORDS) + ranks(sent, ROWS, LOG2)
    values = bf16_saturate(v)
    values = tl.where(values == 0x8000, 0, values)  # never -0
    sum = write_entries(row, wire, first, at, sent, entry, values)
    sum += write_count(row, wire, strips, tile, not_finite, ROWS << LOG2)
    e = tl.where(sent, v - bf16_value(values), v)
    kept = at * 0 + not_finite != 0
    write_residual(
        residual_out, kind, row, segment, first, at, valid, m, raw, old, kept, e, ROWS, LOG2
    )
    if not_finite != 0:
        clear_entries(row, wire, tile, ROWS << LOG2)
    if tile + 1 == tl.load(row + TILES):
        for i in tl.static_range(3):
            store_zeros(wire + tl.load(row + SECTION + i), tl.load(row + USED + i))
        clear_residual_paddings(residual_out, kind, row, segment)
    finish_encode(tables, scratch, wire, tl.load(row + FRAME), sum, flags & CHECKSUM)
