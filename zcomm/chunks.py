"""Chunks: how a flat tensor travels. Items are cut into pieces, pieces fill chunks.

| word  | what it is |
| ----- | --- |
| item  | a parameter (or the one tensor of a collective) inside the flat tensor |
| piece | a part of one owner's run of an item that is never cut; a segment of a layout |
| chunk | the pieces that are encoded, sent and decoded together; it has work for every owner |

The wire of a chunk holds one frame per owner, in the order of ranks but this rank's own frame last:
what goes to the others, and what comes from them, is then one contiguous range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import NamedTuple

import torch

from zcomm.codecs import Codec
from zcomm.layout import Layout, Segment
from zcomm.raw import RawLayout
from zcomm.sharding import cut, piece_numel

# Runs of codecs without blocks are cut at multiples of this.
_PLAIN_BLOCK = 128
# topk selects within a piece: 16 times longer ones leave it more to choose from.
_TOPK_ROWS = 16


class Item(NamedTuple):
    """A parameter at `offset` of the flat tensor; rank r owns its bounds[r]:bounds[r + 1].

    Where the owners' runs do not follow each other, `places` has where each of them begins.
    """

    key: str
    codec: Codec
    numel: int
    offset: int
    bounds: tuple[int, ...]
    places: tuple[int, ...] | None = None

    def place(self, owner: int, start: int) -> int:
        """Where element `start`, of an owner's run, is in the flat tensor."""
        if self.places is None:
            return self.offset + start
        return self.places[owner] + start - self.bounds[owner]


class Piece(NamedTuple):
    """Elements [start, stop) of an item, owned by one rank."""

    item: Item
    start: int
    stop: int
    owner: int


class Chunk:
    """Pieces that travel together.

    `wire` is the layout of all frames over the flat tensor, `own` that of this rank's frame, packed
    from offset 0; `shard_offset` is where that begins among all that this rank owns. fp64 is `raw`.
    """

    def __init__(
        self, pieces: Sequence[Piece], rank: int, world_size: int, shard_offset: int, raw: bool
    ) -> None:
        self.rank = rank
        self.pieces = sorted(pieces, key=lambda p: _slot(p.owner, rank, world_size))
        self.own_pieces = [p for p in self.pieces if p.owner == rank]
        self.numel = sum(p.stop - p.start for p in pieces)
        self.shard_offset = shard_offset
        segments = [_segment(p, _slot(p.owner, rank, world_size)) for p in self.pieces]
        self.wire = _layout(segments, world_size, raw)
        self.own = self.wire.for_peer(world_size - 1)
        self.sum_dtype = torch.float64 if raw else torch.float32
        frames = self.wire.frame_nbytes
        self.own_nbytes = frames[-1]
        self.others_nbytes = self.wire.wire_nbytes - self.own_nbytes
        self.rows_nbytes = self.own_nbytes * (world_size - 1)
        # What goes to, or comes from, each rank: its own frame; or this rank's frame, from each.
        ranks = range(world_size)
        self.frame_splits = [0 if r == rank else frames[_slot(r, rank, world_size)] for r in ranks]
        self.row_splits = [0 if r == rank else self.own_nbytes for r in ranks]

    @cached_property
    def packed(self) -> Layout | RawLayout:
        """The same frames, for a buffer that holds nothing but the chunk's elements."""
        starts = accumulate((s.numel for s in self.wire.segments), initial=0)
        segments = [
            Segment(s.codec, s.numel, start, s.peer) for s, start in zip(self.wire.segments, starts)
        ]
        return _layout(segments, self.wire.peers, self.sum_dtype is torch.float64)

    def needs_rows(self, reduce: bool) -> bool:
        """Whether there are frames of several ranks, or copies of this rank's own for them.

        Between two ranks a gather sends the one frame from where it is.
        """
        return reduce or self.wire.peers > 2

    def placed(self, positions: Mapping[str, int]) -> Layout | RawLayout:
        """The layout of this rank's frame, for a buffer with its run of each item at a position."""
        segments = [
            Segment(
                p.item.codec,
                p.stop - p.start,
                positions[p.item.key] + p.start - p.item.bounds[self.rank],
            )
            for p in self.own_pieces
        ]
        return _layout(segments, 1, self.sum_dtype is torch.float64)

    def runs(self) -> list[Piece]:
        """The pieces in the order of `packed`, neighbours of one item and owner joined."""
        joined: list[Piece] = []
        for piece in self.pieces:
            end = (joined[-1].item, joined[-1].owner, joined[-1].stop) if joined else None
            if end == (piece.item, piece.owner, piece.start):
                joined[-1] = joined[-1]._replace(stop=piece.stop)
            else:
                joined.append(piece)
        return joined


class ChunkSize(NamedTuple):
    """How much a chunk holds, at most: elements, and bytes on the wire."""

    numel: int
    nbytes: int


def best_chunk_size(world_size: int) -> ChunkSize:
    """Large enough to hide what a collective costs besides its bytes, which grows with the ranks;
    small enough that the first and the last chunk, which nothing overlaps with, are a small part of
    a large tensor. The bytes bound the engine's memory.
    """
    return ChunkSize(min(world_size << 19, 1 << 22), 6 << 20)


def make_chunks(
    items: Sequence[Item], rank: int, world_size: int, size: ChunkSize, raw: bool = False
) -> tuple[Chunk, ...]:
    """Chunks of whole rows of pieces, in the order of the items."""
    chunks: list[Chunk] = []
    pending: list[Piece] = []
    numel = nbytes = shard_offset = 0
    for row in _rows(items, world_size):
        row_numel = sum(p.stop - p.start for p in row)
        row_nbytes = sum(_nbytes(p, raw) for p in row)
        if pending and (numel + row_numel > size.numel or nbytes + row_nbytes > size.nbytes):
            chunks.append(Chunk(pending, rank, world_size, shard_offset, raw))
            shard_offset += chunks[-1].own.numel
            pending, numel, nbytes = [], 0, 0
        pending += row
        numel += row_numel
        nbytes += row_nbytes
    if pending:
        chunks.append(Chunk(pending, rank, world_size, shard_offset, raw))
    return tuple(chunks)


def block_of(codec: Codec) -> int:
    """Owners' runs of an item with this codec are cut at multiples of this."""
    return codec.block or _PLAIN_BLOCK


def piece_limit(codec: Codec, world_size: int) -> int:
    """The longest piece of an item with this codec."""
    return piece_numel(world_size, _TOPK_ROWS if codec.name == "topk" else 1)


def _rows(items: Sequence[Item], world_size: int) -> Iterator[list[Piece]]:
    """The n-th pieces of all owners of an item, for n = 0, 1, ...: even work for all of them."""
    for item in items:
        limit = piece_limit(item.codec, world_size)
        runs = [
            [Piece(item, a, b, r) for a, b in cut(item.bounds[r], item.bounds[r + 1], limit)]
            for r in range(world_size)
        ]
        for row in zip_longest(*runs):
            yield [piece for piece in row if piece is not None]


def _nbytes(piece: Piece, raw: bool) -> int:
    numel = piece.stop - piece.start
    return 8 * numel if raw else piece.item.codec.body_nbytes(numel)


def _slot(owner: int, rank: int, world_size: int) -> int:
    """The place of an owner's frame: ranks in order, this rank last."""
    return world_size - 1 if owner == rank else owner - (owner > rank)


def _segment(piece: Piece, slot: int) -> Segment:
    item = piece.item
    place = item.place(piece.owner, piece.start)
    return Segment(item.codec, piece.stop - piece.start, place, slot)


def _layout(segments: Sequence[Segment], peers: int, raw: bool) -> Layout | RawLayout:
    return RawLayout(segments, peers) if raw else Layout(segments, peers)
