"""What a program reads from the layout's table (plan.py), and where its tile's elements lie.

Addresses are int64. Rows and columns of a tile are its blocks and their elements; an element's
place in the tile, and every count within a tile, is int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zcomm.kernels.triton import plan

SEGMENTS_AT: tl.constexpr = tl.constexpr(plan.SIGN_WORDS)
FRAMES_AT: tl.constexpr = tl.constexpr(plan.SIGN_WORDS + 1)
SEGMENTS: tl.constexpr = tl.constexpr(plan.SIGN_WORDS + 2)
FRAMES: tl.constexpr = tl.constexpr(plan.SIGN_WORDS + 3)
SEGMENT_WORDS: tl.constexpr = tl.constexpr(len(plan.SEGMENT))
FRAME_WORDS: tl.constexpr = tl.constexpr(len(plan.FRAME))
TILE_WORDS: tl.constexpr = tl.constexpr(len(plan.TILE))

N: tl.constexpr = tl.constexpr(plan.SEGMENT.index("n"))
K: tl.constexpr = tl.constexpr(plan.SEGMENT.index("k"))
OFFSET: tl.constexpr = tl.constexpr(plan.SEGMENT.index("offset"))
SECTION: tl.constexpr = tl.constexpr(plan.SEGMENT.index("section_0"))
USED: tl.constexpr = tl.constexpr(plan.SEGMENT.index("used_0"))
RESIDUAL_CODES: tl.constexpr = tl.constexpr(plan.SEGMENT.index("residual_codes"))
RESIDUAL_USED: tl.constexpr = tl.constexpr(plan.SEGMENT.index("residual_used_0"))
FRAME: tl.constexpr = tl.constexpr(plan.SEGMENT.index("frame"))
FRAME_START: tl.constexpr = tl.constexpr(plan.SEGMENT.index("frame_start"))
TOPK: tl.constexpr = tl.constexpr(plan.SEGMENT.index("topk"))
FIRST_TILE: tl.constexpr = tl.constexpr(plan.SEGMENT.index("first_tile"))
TILES: tl.constexpr = tl.constexpr(plan.SEGMENT.index("tiles"))

# The bits of an encode call's flags: the gradient's and the residuals' dtype by number, whether
# there is a checksum, whether idle segments keep their residuals.
GRAD_FP32: tl.constexpr = tl.constexpr(0)
GRAD_BF16: tl.constexpr = tl.constexpr(1)
RESIDUAL_SHIFT: tl.constexpr = tl.constexpr(2)
CHECKSUM: tl.constexpr = tl.constexpr(16)
KEEP_IDLE: tl.constexpr = tl.constexpr(32)


@triton.jit
def words_at(address: tl.tensor) -> tl.tensor:
    return address.to(tl.int64).to(tl.pointer_type(tl.int64))


@triton.jit
def shorts_at(address: tl.tensor) -> tl.tensor:
    return address.to(tl.int64).to(tl.pointer_type(tl.uint16))


@triton.jit
def ints_at(address: tl.tensor) -> tl.tensor:
    return address.to(tl.int64).to(tl.pointer_type(tl.int32))


@triton.jit
def bytes_at(address: tl.tensor) -> tl.tensor:
    return address.to(tl.int64).to(tl.pointer_type(tl.uint8))


@triton.jit
def align16(nbytes: tl.tensor) -> tl.tensor:
    return (nbytes + 15) & -16


@triton.jit
def segment_at(tables: tl.tensor, segment: tl.tensor) -> tl.tensor:
    """A pointer to the segment's row."""
    table = words_at(tables)
    return table + tl.load(table + SEGMENTS_AT) + segment * SEGMENT_WORDS


@triton.jit
def frame_at(tables: tl.tensor, frame: tl.tensor) -> tl.tensor:
    table = words_at(tables)
    return table + tl.load(table + FRAMES_AT) + frame * FRAME_WORDS


@triton.jit
def tile_at(tiles: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """This program's segment and its tile there, or NO_SEGMENT and a frame."""
    row = words_at(tiles) + tl.program_id(0).to(tl.int64) * TILE_WORDS
    return tl.load(row), tl.load(row + 1)


@triton.jit
def own_tile(tables: tl.tensor, tiles: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """This program's segment, its tile there, and the segment's row."""
    segment, tile = tile_at(tiles)
    return segment, tile, segment_at(tables, segment)


@triton.jit
def elements_left(row: tl.tensor, first: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """How many of the tile's elements the segment has, from its element `first` on."""
    return tl.minimum(tl.load(row + N) - first, TILE).to(tl.int32)


@triton.jit
def places(ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """0, 1, ... in the order of rows: the place in the tile of each element."""
    return tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def block_lengths(left: tl.tensor, ROWS: tl.constexpr, LOG2: tl.constexpr) -> tl.tensor:
    """Elements of each block, 0 past the segment's end."""
    return tl.minimum(tl.maximum(left - (tl.arange(0, ROWS) << LOG2), 0), 1 << LOG2)


@triton.jit
def section_byte(row: tl.tensor, i: tl.constexpr, byte: tl.tensor) -> tl.tensor:
    """Where a byte of section i lies in its frame, which gives its weight in the checksum."""
    return tl.load(row + SECTION + i) - tl.load(row + FRAME_START) + byte


@triton.jit
def padded_left(row: tl.tensor, i: tl.constexpr, byte: tl.tensor, MOST: tl.constexpr) -> tl.tensor:
    """Bytes of section i, padding included, from `byte` on; MOST if there are more."""
    left = align16(tl.load(row + USED + i)) - byte
    return tl.minimum(tl.maximum(left, 0), MOST).to(tl.int32)


@triton.jit
def store_zeros(address: tl.tensor, used: tl.tensor) -> None:
    """What follows `used` bytes up to a multiple of 16."""
    at = used + tl.arange(0, 16)
    zeros = tl.zeros([16], tl.uint8)
    tl.store(bytes_at(address) + at, zeros, mask=at < align16(used))
