"""topk: finds the k-th largest magnitude of each segment with four histograms, one per digit, then
writes entries in the order of elements.

| launch       | what it leaves for the next one                                              |
| ------------ | ---------------------------------------------------------------------------- |
| topk_digit d | the histogram of digit d, of the magnitudes whose upper digits are known     |
| topk_count   | the threshold; of each tile, how many elements lie above it and how many on it |
| topk_share   | of each tile, where its entries begin and how many of its ties are sent      |
| topk_write   | the wire and the residual                                                    |

Ties at the threshold go to lower elements. All launches have the same tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zcomm.kernels.triton import plan
from zcomm.kernels.triton.arguments import ENCODE_ARGUMENTS
from zcomm.kernels.triton.bits import INF, magnitude
from zcomm.kernels.triton.tile import (
    FIRST_TILE,
    FRAMES,
    SEGMENTS,
    TILES,
    TOPK,
    K,
    own_tile,
    words_at,
)
from zcomm.kernels.triton.values import load_rows, residual_kind

BINS: tl.constexpr = tl.constexpr(plan.TOPK_BINS)
DIGITS: tl.constexpr = tl.constexpr(plan.TOPK_DIGITS)
TOPK_WORDS: tl.constexpr = tl.constexpr(plan.TOPK_WORDS)
TOPK_SEGMENTS: tl.constexpr = tl.constexpr(plan.SIGN_WORDS + plan.HEADER.index("topk_segments"))
STRIP_WORDS: tl.constexpr = tl.constexpr(plan.STRIP_WORDS)
# In a segment's scratch memory, after the histograms: whether an element that is not finite was
# FOUND so far, and the answer for later launches; then, for each known digit, the digits so far and
# how many elements with these digits are sent.
FOUND: tl.constexpr = tl.constexpr(plan.TOPK_BINS * plan.TOPK_DIGITS)
NOT_FINITE: tl.constexpr = tl.constexpr(plan.TOPK_BINS * plan.TOPK_DIGITS + 1)
KNOWN: tl.constexpr = tl.constexpr(plan.TOPK_BINS * plan.TOPK_DIGITS + 2)


@triton.jit
def topk_at(tables: tl.tensor, scratch: tl.tensor, row: tl.tensor) -> tl.tensor:
    """The segment's scratch memory."""
    table = words_at(tables)
    first = 2 * tl.load(table + FRAMES) + tl.load(table + SEGMENTS)
    return words_at(scratch) + first + tl.load(row + TOPK) * TOPK_WORDS


@triton.jit
def strips_at(tables: tl.tensor, scratch: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Two words for each of the segment's tiles, after the memory of all topk segments."""
    table = words_at(tables)
    first = 2 * tl.load(table + FRAMES) + tl.load(table + SEGMENTS)
    first += tl.load(table + TOPK_SEGMENTS) * TOPK_WORDS
    return words_at(scratch) + first + tl.load(row + FIRST_TILE) * STRIP_WORDS


@triton.jit
def known_digits(
    topk: tl.tensor, row: tl.tensor, COUNT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The threshold's first COUNT digits, and how many elements with these digits are sent."""
    if COUNT == 0:
        return tl.load(row + K) * 0, tl.load(row + K)
    else:
        before, left = tl.load(row + K) * 0, tl.load(row + K)
        if COUNT > 1:
            before = tl.load(topk + KNOWN + 2 * (COUNT - 1))
            left = tl.load(topk + KNOWN + 2 * (COUNT - 1) + 1)
        bins = tl.arange(0, BINS)
        counts = tl.load(topk + BINS * (COUNT - 1) + bins)
        from_here = tl.sum(counts) - tl.cumsum(counts) + counts  # elements of this digit or higher
        digit = tl.sum((from_here >= left).to(tl.int64)) - 1
        above = tl.sum(tl.where(bins > digit, counts, 0))
        return before * BINS + digit, left - above


@triton.jit
def save_digits(
    topk: tl.tensor, tile: tl.tensor, before: tl.tensor, left: tl.tensor, COUNT: tl.constexpr
) -> None:
    """The segment's first tile saves them for the next launch."""
    if tile == 0:
        tl.store(topk + KNOWN + 2 * COUNT, before)
        tl.store(topk + KNOWN + 2 * COUNT + 1, left)


@triton.jit
def load_tile(
    tables: tl.tensor,
    scratch: tl.tensor,
    grad: tl.tensor,
    residual_in: tl.tensor,
    prescale: tl.tensor,
    flags: tl.tensor,
    row: tl.tensor,
    segment: tl.tensor,
    tile: tl.tensor,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """v, which elements exist, and what storing their residual takes."""
    kind = residual_kind(tables, scratch, residual_in, segment, flags)
    v, _, valid, m, raw, old = load_rows(
        grad, residual_in, prescale, flags, row, segment, kind, tile * (ROWS << LOG2), ROWS, LOG2
    )
    return v, valid, m, kind, raw, old


@triton.jit(do_not_specialize=ENCODE_ARGUMENTS)
def topk_digit(
    tables: tl.int64,
    tiles: tl.int64,
    scratch: tl.int64,
    grad: tl.int64,
    wire: tl.int64,
    residual_in: tl.int64,
    residual_out: tl.int64,
    prescale: tl.int64,
    flags: tl.int64,
    DIGIT: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> None:
    segment, tile, row = own_tile(tables, tiles)
    topk = topk_at(tables, scratch, row)
    v, valid, _, _, _, _ = load_tile(
        tables, scratch, grad, residual_in, prescale, flags, row, segment, tile, ROWS, LOG2
    )
    u = magnitude(v)
    SHIFT: tl.constexpr = 8 * (DIGITS - 1 - DIGIT)
    counted = valid
    if DIGIT == 0:
        if tl.max(u) >= INF:
            tl.store(topk + FOUND, 1)
    else:
        before, left = known_digits(topk, row, DIGIT)
        save_digits(topk, tile, before, left, DIGIT)
        counted = valid & ((u >> (SHIFT + 8)) == before)
    digits = tl.where(counted, (u >> SHIFT) & (BINS - 1), 0)
    bins = tl.arange(0, BINS)
    counts = tl.histogram(tl.reshape(digits, (ROWS << LOG2,)), BINS).to(tl.int64)
    # The other elements were counted as zeros.
    counts -= tl.where(bins == 0, (ROWS << LOG2) - tl.sum(counted.to(tl.int64)), 0)
    tl.atomic_add(topk + BINS * DIGIT + bins, counts, mask=counts != 0)


@triton.jit(do_not_specialize=ENCODE_ARGUMENTS)
def topk_count(
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
    topk = topk_at(tables, scratch, row)
    threshold, ties = known_digits(topk, row, DIGITS)
    save_digits(topk, tile, threshold, ties, DIGITS)
    v, valid, _, _, _, _ = load_tile(
        tables, scratch, grad, residual_in, prescale, flags, row, segment, tile, ROWS, LOG2
    )
    u = magnitude(v)
    strip = strips_at(tables, scratch, row) + tile * STRIP_WORDS
    tl.store(strip, tl.sum((valid & (u > threshold)).to(tl.int64)))
    tl.store(strip + 1, tl.sum((valid & (u == threshold)).to(tl.int64)))


@triton.jit(do_not_specialize=ENCODE_ARGUMENTS)
def topk_share(
    tables: tl.int64,
    tiles: tl.int64,
    scratch: tl.int64,
    grad: tl.int64,
    wire: tl.int64,
    residual_in: tl.int64,
    residual_out: tl.int64,
    prescale: tl.int64,
    flags: tl.int64,
    CHUNK: tl.constexpr,
) -> None:
    """A segment's first tile does the work for all its tiles, and clears the histograms."""
    _, tile, row = own_tile(tables, tiles)
    if tile == 0:
        topk = topk_at(tables, scratch, row)
        tl.store(topk + NOT_FINITE, tl.load(topk + FOUND))
        tl.store(topk + FOUND, 0)
        for digit in tl.static_range(DIGITS):
            tl.store(topk + digit * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int64))
        ties = tl.load(topk + KNOWN + 2 * DIGITS + 1)
        count = tl.load(row + TILES)
        strips = strips_at(tables, scratch, row)
        first, above_before, equal_before = count * 0, count * 0, count * 0
        while first < count:
            i = first + tl.arange(0, CHUNK)
            above = tl.load(strips + i * STRIP_WORDS, mask=i < count, other=0)
            equal = tl.load(strips + i * STRIP_WORDS + 1, mask=i < count, other=0)
            sent = tl.minimum(equal_before + tl.cumsum(equal) - equal, ties)
            position = above_before + tl.cumsum(above) - above + sent
            tl.store(strips + i * STRIP_WORDS, position, mask=i < count)
            own = tl.minimum(equal, ties - sent)
            tl.store(strips + i * STRIP_WORDS + 1, own, mask=i < count)
            above_before += tl.sum(above)
            equal_before += tl.sum(equal)
            first += CHUNK
