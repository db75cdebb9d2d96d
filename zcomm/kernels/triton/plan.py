"""A layout as the kernels see it: one table of int64 numbers, and the launches of a call.

| words of the table | contents                                                     |
| ------------------ | ------------------------------------------------------------ |
| 0 ... 15           | the sign words of lm*                                        |
| 16 ... 20          | HEADER: where segments and frames begin; how many there are  |
| segments           | SEGMENT, one row each                                        |
| frames             | FRAME, one row each                                          |
| tiles              | TILE, one row each; those of one launch are contiguous       |

A tile is a run of `tile_elements` elements of one segment, the work of one program. A frame without
elements has an empty tile of `none`, which writes or checks its header.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from zcomm.kernels.base import KernelLayout
from zcomm.wire import header as wire
from zcomm.wire import lm_tables
from zcomm.wire.header import CODEC_IDS, Frame, align16
from zcomm.wire.segments import Segment

HEADER = ("segments_at", "frames_at", "segments", "frames", "topk_segments")
SEGMENT = (
    "n",
    "k",
    "offset",
    "section_0",  # bytes from the start of the wire
    "section_1",
    "section_2",
    "used_0",  # bytes before padding
    "used_1",
    "used_2",
    "residual_codes",  # int8 storage
    "residual_used_0",
    "residual_used_1",
    "frame",
    "frame_start",
    "topk",  # its index among the layout's topk segments
    "first_tile",  # the number of tiles of earlier topk segments
    "tiles",
)
FRAME = ("start", "tiles", "word_0", "word_1", "word_2")  # the header without a checksum
TILE = ("segment", "index")  # or NO_SEGMENT and the frame
NO_SEGMENT = -1
SIGN_WORDS = 16

PLAIN_BLOCK = 128  # the block of int8 storage under a codec without blocks
TOPK_RANGE = 65536
# A topk segment's scratch memory: histograms of four digits, then state between launches.
TOPK_BINS = 256
TOPK_DIGITS = 4
TOPK_STATE = 2 + 2 * (TOPK_DIGITS + 1)
TOPK_WORDS = TOPK_DIGITS * TOPK_BINS + TOPK_STATE
STRIP_WORDS = 2

# The codecs that these kernels have, but for topk: the bits of a code.
PLAIN_WIDTHS = {"none": 32, "bf16": 16, "fp16": 16}
BLOCK_WIDTHS = {"int8": 8, "fp8": 8, "int4": 4, "lm4": 4, "lm3": 3, "lm2": 2, "sign": 1}
_WIDTHS = {CODEC_IDS[name]: bits for name, bits in (PLAIN_WIDTHS | BLOCK_WIDTHS).items()}
_LM = range(CODEC_IDS["lm4"], CODEC_IDS["lm2"] + 1)
_TOPK = CODEC_IDS["topk"]
_KNOWN = {*_WIDTHS, _TOPK}
_MAX_PARTS = 1 << 24  # a fault has bits for this many
_MAX_PROGRAMS = (1 << 31) - 1


class Group(NamedTuple):
    """The tiles of one launch: those of a codec and block size."""

    codec: int
    block: int
    first_tile: int
    tiles: int


class TilePlan:
    """A layout's table, its launches, and how much scratch memory calls need."""

    def __init__(self, layout: KernelLayout, tile_elements: int) -> None:
        if max(len(layout.segments), len(layout.frames)) >= _MAX_PARTS:
            raise ValueError(f"layout: expected less than {_MAX_PARTS} segments and frames")
        if any(s.codec.id not in _KNOWN for s in layout.segments):
            raise ValueError("layout: a segment's codec is none that Triton kernels know")
        self.tile_elements = tile_elements
        self.frames, self.segments = len(layout.frames), len(layout.segments)
        self.topk_segments = sum(s.codec.id == _TOPK for s in layout.segments)
        self._topk_tiles = sum(self._tiles(s) for s in layout.segments if s.codec.id == _TOPK)
        rows, self.groups = self._tile_rows(layout)
        self.table, self.tiles_at = self._table(layout, rows)

    def encode_scratch_words(self) -> int:
        """Per frame the checksum so far and the tiles done; idle segments; topk."""
        topk = TOPK_WORDS * self.topk_segments + STRIP_WORDS * self._topk_tiles
        return 2 * self.frames + self.segments + topk

    def decode_scratch_words(self, wires: int) -> int:
        """Per frame the tiles done, and the checksum of each wire."""
        return self.frames * (1 + wires)

    def _tiles(self, segment: Segment) -> int:
        return -(-segment.numel // self.tile_elements)

    def _tile_rows(self, layout: KernelLayout) -> tuple[Tensor, list[Group]]:
        by_launch: dict[tuple[int, int], list[Tensor]] = {}
        for i, segment in enumerate(layout.segments):
            if segment.numel:
                index = torch.arange(self._tiles(segment))
                rows = torch.stack((torch.full_like(index, i), index), 1)
                by_launch.setdefault(_launch(segment), []).append(rows)
        used = {s.peer for s in layout.segments if s.numel}
        empty = [(NO_SEGMENT, f) for f in range(self.frames) if f not in used]
        if empty:
            by_launch.setdefault((CODEC_IDS["none"], 0), []).append(torch.tensor(empty))
        groups, at = [], 0
        for (codec, block), parts in sorted(by_launch.items(), key=lambda item: item[0]):
            count = sum(len(part) for part in parts)
            if count > _MAX_PROGRAMS:
                raise ValueError(f"layout: expected at most {_MAX_PROGRAMS} tiles of one codec")
            groups.append(Group(codec, block, at, count))
            at += count
        ordered = [part for _, parts in sorted(by_launch.items()) for part in parts]
        return torch.cat([torch.empty(0, len(TILE), dtype=torch.int64), *ordered]), groups

    def _table(self, layout: KernelLayout, tile_rows: Tensor) -> tuple[Tensor, int]:
        segments = list(self._segment_rows(layout))
        frames = list(self._frame_rows(layout))
        segments_at = SIGN_WORDS + len(HEADER)
        frames_at = segments_at + len(SEGMENT) * len(segments)
        counts = [len(segments), len(frames), self.topk_segments]
        head = [*map(_signed, lm_tables.SIGN_WORDS), segments_at, frames_at, *counts]
        numbers = [*head, *(x for row in (*segments, *frames) for x in row)]
        parts = (torch.tensor(numbers, dtype=torch.int64), tile_rows.reshape(-1))
        return torch.cat(parts), len(numbers)

    def _segment_rows(self, layout: KernelLayout) -> Iterator[tuple[int, ...]]:
        topk, first_tile = 0, 0
        for segment, body in zip(layout.segments, layout.body_starts):
            n, codec, tiles = segment.numel, segment.codec, self._tiles(segment)
            used = _used(segment)
            starts = [body + sum(map(align16, used[:i])) for i in range(3)]
            block = 1 << codec.log2_block if codec.log2_block else PLAIN_BLOCK
            scales = 2 * -(-n // block)
            row = {
                "n": n,
                "k": codec.k(n),
                "offset": segment.offset,
                "tiles": tiles,
                **{f"section_{i}": start for i, start in enumerate(starts)},
                **{f"used_{i}": nbytes for i, nbytes in enumerate(used)},
                "residual_codes": align16(scales),
                "residual_used_0": scales,
                "residual_used_1": n,
                "frame": segment.peer,
                "frame_start": layout.frames[segment.peer].start,
                "topk": topk,
                "first_tile": first_tile,
            }
            yield tuple(row[name] for name in SEGMENT)
            if codec.id == _TOPK:
                topk, first_tile = topk + 1, first_tile + tiles

    def _frame_rows(self, layout: KernelLayout) -> Iterator[tuple[int, ...]]:
        tiles = [0] * self.frames
        for segment in layout.segments:
            tiles[segment.peer] += self._tiles(segment)
        for frame, count in zip(layout.frames, tiles):
            yield frame.start, max(count, 1), *_header_words(frame)


def _launch(segment: Segment) -> tuple[int, int]:
    log2 = segment.codec.log2_block
    return segment.codec.id, 1 << log2 if log2 else 0


def _used(segment: Segment) -> tuple[int, int, int]:
    """Bytes before padding of a segment's sections."""
    n, codec = segment.numel, segment.codec
    if codec.id == _TOPK:
        return 4 * -(-n // TOPK_RANGE), 2 * codec.k(n), 2 * codec.k(n)
    width = _WIDTHS[codec.id]
    if not codec.log2_block:
        return n * width // 8, 0, 0
    full, rest = divmod(n, 1 << codec.log2_block)
    codes = 1 << (rest - 1).bit_length() if codec.id in _LM and rest else rest
    whole = full * width << codec.log2_block
    return 2 * (full + (rest > 0)), whole // 8 + (codes * width + 7) // 8, 0


def _header_words(frame: Frame) -> list[int]:
    header = wire.frame_header(frame, verify=False)
    return [_signed(int.from_bytes(header[i : i + 8], "little")) for i in (0, 8, 16)]


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
