"""topk: the sum over wires of a tile, in `out` itself, wire after wire.

A binary search in a range's offsets gives the entries of each tile. Whatever the offsets are, a
search for a higher bound ends at the same place or later, so the tiles' entries are neighbours
without gap or overlap: every entry is read, checked and counted in the checksum once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zcomm.kernels.triton.arguments import DECODE_ARGUMENTS
from zcomm.kernels.triton.bits import BF16_MAX, NAN, bf16_value, bits, from_bits
from zcomm.kernels.triton.frame import (
    FAULT_PADDING,
    FAULT_TOPK_COUNT,
    FAULT_TOPK_ENTRIES,
    FAULT_TOPK_FLAGS,
    FAULT_TOPK_OFFSET,
    FAULT_TOPK_TOTAL,
    FAULT_TOPK_VALUE,
    NO_FAULT,
    add_sum,
    finish_decode,
    part,
    refuse_body,
    wire_at,
)
from zcomm.kernels.triton.padding import check_padding
from zcomm.kernels.triton.tile import (
    FRAME,
    OFFSET,
    SECTION,
    TILES,
    USED,
    K,
    N,
    elements_left,
    ints_at,
    own_tile,
    section_byte,
    shorts_at,
)
from zcomm.kernels.triton.topk_write import RANGE

FLAGGED: tl.constexpr = tl.constexpr(0xFFFFFFFF)


@triton.jit
def sum_counts(
    row: tl.tensor, wire: tl.tensor, first: tl.tensor, CHUNK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Entries before the range of element `first` and in it, why the counts are refused, how many
    of them are flagged, and their checksum."""
    n, ranges = tl.load(row + N), tl.load(row + USED) // 4
    own_range = first // RANGE
    begin, before, own, total, flagged = n * 0, n * 0, n * 0, n * 0, n * 0
    beyond, sum = n * 0, n * 0
    while begin < ranges:
        i = begin + tl.arange(0, CHUNK)
        address = ints_at(wire + tl.load(row + SECTION))
        count = tl.load(address + i, mask=i < ranges, other=0).to(tl.int64) & FLAGGED
        is_flag = count == FLAGGED
        too_many = (i < ranges) & (is_flag == 0) & (count > tl.minimum(n - i * RANGE, RANGE))
        usable = tl.where(is_flag | too_many, 0, count)
        flagged += tl.sum(is_flag.to(tl.int64))
        beyond += tl.sum(too_many.to(tl.int64))
        total += tl.sum(usable)
        before += tl.sum(tl.where(i < own_range, usable, 0))
        own += tl.sum(tl.where(i == own_range, usable, 0))
        sum += tl.sum(part(count, section_byte(row, 0, i * 4)))
        begin += CHUNK
    low = tl.where((flagged == 0) & (total != tl.load(row + K)), FAULT_TOPK_TOTAL, NO_FAULT)
    low = tl.where((flagged != 0) & (flagged != ranges), FAULT_TOPK_FLAGS, low)
    low = tl.where(beyond != 0, FAULT_TOPK_COUNT, low)
    return before, own, low, flagged, sum


@triton.jit
def lower_bound(offsets: tl.tensor, count: tl.tensor, bound: tl.tensor, n: tl.tensor) -> tl.tensor:
    """How many of a range's offsets come before `bound`; all, at the end of the range."""
    low, high = count * 0, count
    if bound >= n:
        low = count
    while low < high:
        middle = (low + high) // 2
        if tl.load(offsets + middle).to(tl.int64) < bound:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def add_entries(
    row: tl.tensor,
    wire: tl.tensor,
    to: tl.tensor,
    first: tl.tensor,
    left: tl.tensor,
    before: tl.tensor,
    own: tl.tensor,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Adds the tile's entries to `to`; returns why they are refused, and their checksum."""
    offset_of_tile = first % RANGE
    n = tl.minimum(tl.load(row + N) - (first - offset_of_tile), RANGE)
    offsets = shorts_at(wire + tl.load(row + SECTION + 1)) + before
    values = shorts_at(wire + tl.load(row + SECTION + 2)) + before
    begin = lower_bound(offsets, own, offset_of_tile, n)
    end = lower_bound(offsets, own, offset_of_tile + TILE, n)
    low, sum = (n * 0 + NO_FAULT).to(tl.int32), n * 0
    while begin < end:
        i = begin + tl.arange(0, CHUNK)
        there = i < end
        offset = tl.load(offsets + i, mask=there, other=0).to(tl.int32)
        value = tl.load(values + i, mask=there, other=0).to(tl.int32)
        last = tl.load(offsets + i - 1, mask=there & (i > 0), other=0).to(tl.int32)
        ordered = ((offset > last) | (i == 0)) & (offset < n)
        known = ((value & 0x7FFF) <= BF16_MAX) & (value != 0x8000)
        bad = tl.where(known, NO_FAULT, FAULT_TOPK_VALUE | value)
        bad = tl.where(ordered, bad, FAULT_TOPK_OFFSET | offset)
        low = tl.minimum(low, tl.min(tl.where(there, bad, NO_FAULT)))
        # Offsets that do not increase may point anywhere.
        at = offset - offset_of_tile.to(tl.int32)
        inside = there & (at >= 0) & (at < left)
        total = from_bits(tl.load(to + at, mask=inside, other=0)) + bf16_value(value)
        tl.store(to + at, bits(total), mask=inside)
        sums = part(offset.to(tl.int64), section_byte(row, 1, (before + i) * 2))
        sums += part(value.to(tl.int64), section_byte(row, 2, (before + i) * 2))
        sum += tl.sum(tl.where(there, sums, 0))
        begin += CHUNK
    return low, sum


@triton.jit
def skip_entries(
    row: tl.tensor, wire: tl.tensor, tile: tl.tensor, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Skips unusable entries: whether one in the tile's share is not 0, and their checksum."""
    k, tiles = tl.load(row + K), tl.load(row + TILES)
    i = k * tile // tiles + tl.arange(0, TILE)
    mine = i < k * (tile + 1) // tiles
    offset = tl.load(shorts_at(wire + tl.load(row + SECTION + 1)) + i, mask=mine, other=0)
    value = tl.load(shorts_at(wire + tl.load(row + SECTION + 2)) + i, mask=mine, other=0)
    sums = part(offset.to(tl.int64), section_byte(row, 1, i * 2))
    sums += part(value.to(tl.int64), section_byte(row, 2, i * 2))
    return tl.max((offset | value).to(tl.int32)) != 0, tl.sum(sums)


@triton.jit
def check_paddings(row: tl.tensor, wire: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Checks all three sections: FAULT_PADDING or NO_FAULT, and the paddings' checksum."""
    nonzero, sum = check_padding(row, wire, 0)
    for i in tl.static_range(1, 3):
        another, more = check_padding(row, wire, i)
        nonzero, sum = nonzero | another, sum + more
    return tl.where(nonzero, FAULT_PADDING, NO_FAULT), sum


@triton.jit(do_not_specialize=DECODE_ARGUMENTS)
def decode_topk(
    tables: tl.int64,
    tiles: tl.int64,
    scratch: tl.int64,
    wires: tl.int64,
    stride: tl.int64,
    count: tl.int64,
    out: tl.int64,
    fault: tl.int64,
    verify: tl.int64,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    segment, tile, row = own_tile(tables, tiles)
    frame, first = tl.load(row + FRAME), tile * TILE
    left = elements_left(row, first, TILE)
    at = tl.arange(0, TILE)
    to = ints_at(out + (tl.load(row + OFFSET) + first) * 4)
    ends = tile + 1 == tl.load(row + TILES)
    tl.store(to + at, tl.zeros([TILE], tl.int32), mask=at < left)
    tl.debug_barrier()
    not_finite = first * 0
    for w in range(count):
        wire = wire_at(wires, stride, w)
        before, own, low, flagged, sum = sum_counts(row, wire, first, CHUNK)
        sum = tl.where(tile == 0, sum, 0)  # once for all tiles
        if (low == NO_FAULT) & (flagged == 0):
            found, more = add_entries(row, wire, to, first, left, before, own, CHUNK, TILE)
            low = tl.minimum(low, found)
            sum += more
        else:
            nonzero, more = skip_entries(row, wire, tile, TILE)
            sum += more
            if low == NO_FAULT:
                not_finite += 1
                low = tl.where(nonzero, FAULT_TOPK_ENTRIES, low)
        if ends:
            padding, more = check_paddings(row, wire)
            low = tl.minimum(low, padding)
            sum += more
        refuse_body(fault, w, segment, low)
        add_sum(tables, scratch, frame, w, sum, verify)
        tl.debug_barrier()  # the next wire adds to the same elements
    if not_finite != 0:
        tl.store(to + at, tl.full([TILE], NAN, tl.int32), mask=at < left)
    finish_decode(tables, scratch, wires, stride, count, frame, fault, verify)
