"""Chunks: how a flat tensor travels. Items are cut into pieces, pieces fill chunks.

| word  | what it is |
| ----- | --- |
| item  | a parameter (or the one tensor of a collective) inside the flat tensor |
| piece | a part of one owner's run of an item; never cut further; a segment of a layout |
| chunk | the pieces that are encoded, sent and decoded together; it has work for every owner |

The wire of a chunk holds one frame per owner, in the order of ranks but this rank's own frame last:
what goes to the others, and what comes from them, is then one contiguous range.

With hosts, a chunk has a smaller one for each hop: `local`, pieces grouped by their owner's deputy
on this host, and `across`, what this rank sums of them, grouped by owner. The frames of the whole
are ordered by deputy, those of this rank last: that part is the wire of `across`. Between hosts a
rank may send to other ranks than it hears from, where hosts have different numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

import torch

from zcomm.codecs import Codec
from zcomm.codecs.layout import Layout, Segment
from zcomm.codecs.raw import RawLayout
from zcomm.kernels import cpu
from zcomm.sharding.hierarchy import Hosts
from zcomm.sharding.owners import cut, piece_numel

# Runs of codecs without blocks are cut at multiples of this.
_PLAIN_BLOCK = 128
# Longer chunks overlap too little.
MOST_CHUNK_NUMEL = 1 << 22
# topk selects within a piece: 16 times longer ones leave it more to choose from.
_TOPK_ROWS = 16


class Item(NamedTuple):
    """A parameter at `offset` of the flat tensor; rank r owns its bounds[r]:bounds[r + 1].

    Where the owners' runs do not follow each other, `run_offsets` says where each begins.
    """

    key: str
    codec: Codec
    numel: int
    offset: int
    bounds: tuple[int, ...]
    run_offsets: tuple[int, ...] | None = None

    def offset_of(self, owner: int, start: int) -> int:
        """Where element `start`, in an owner's run, lies in the flat tensor."""
        if self.run_offsets is None:
            return self.offset + start
        return self.run_offsets[owner] + start - self.bounds[owner]


class Piece(NamedTuple):
    """Elements [start, stop) of an item, owned by one rank, at `offset` of the flat tensor."""

    item: Item
    start: int
    stop: int
    owner: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class TwoHops(NamedTuple):
    """How to make chunks for two hops: the hosts, and the codec inside them."""

    hosts: Hosts
    codec: Codec


class Chunk:
    """Pieces that travel together.

    `wire` is the layout of all frames over the flat tensor, `own` that of this rank's frame, packed
    from offset 0; `shard_offset` is where that begins among all that this rank owns. fp64 is `raw`.
    Frames are in the order of `senders`, ranks as errors name them. Its own frame comes from each
    of `sources`; the all-to-all is among `members`. Both are the senders, but between hosts.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        senders: Sequence[int],
        shard_offset: int,
        raw: bool,
        two_hops: TwoHops | None = None,
        sources: Iterable[int] | None = None,
        members: Iterable[int] | None = None,
    ) -> None:
        *_, self.rank = self.senders = tuple(senders)
        self.sources = sorted(senders if sources is None else sources)
        slots = {r: slot for slot, r in enumerate(senders)}
        self.pieces = sorted(pieces, key=lambda p: slots[p.owner])
        self.own_pieces = [p for p in self.pieces if p.owner == self.rank]
        self.numel = sum(p.numel for p in pieces)
        self.shard_offset = shard_offset
        self.raw = raw
        segments = [Segment(p.item.codec, p.numel, p.offset, slots[p.owner]) for p in self.pieces]
        self.wire = _layout(segments, len(senders), raw)
        self.own = self.wire.for_peer(len(senders) - 1)
        self.sum_dtype = torch.float64 if raw else torch.float32
        frames = self.wire.frame_nbytes
        self.own_nbytes = frames[-1]
        self.others_nbytes = self.wire.wire_nbytes - self.own_nbytes
        self.rows_nbytes = self.own_nbytes * (len(self.sources) - 1)
        # What goes to, or comes from, each rank: its own frame; or this rank's frame, from each.
        others = dict(zip(self.senders[:-1], frames))
        sources = set(self.sources) - {self.rank}
        exchanging = sorted(senders if members is None else members)
        self.frame_splits = [others.get(r, 0) for r in exchanging]
        self.row_splits = [self.own_nbytes if r in sources else 0 for r in exchanging]
        self.index = self.sources.index(self.rank)
        self.hops = None if two_hops is None else Hops(self, two_hops)

    @property
    def coded(self) -> Chunk:
        """The chunk of the encoding with residuals: between hosts, if there are several."""
        return self if self.hops is None else self.hops.across

    @cached_property
    def starts_at_peers(self) -> dict[int, int]:
        """Where this rank's frame begins in the wire of every other rank, with one hop."""
        starts = self.starts_of(self.rank)
        del starts[self.rank]
        return starts

    def starts_of(self, owner: int) -> dict[int, int]:
        """Where an owner's frame begins in the wire of every rank, with one hop."""
        nbytes = dict(zip(self.senders, self.wire.frame_nbytes))
        starts = {}
        for r in sorted(self.senders):
            order = own_last(self.senders, r)
            starts[r] = sum(nbytes[before] for before in order[: order.index(owner)])
        return starts

    @cached_property
    def owned_layouts(self) -> list[Layout | RawLayout]:
        """Each owner's frame, packed, in the order of the group."""
        slots = {r: slot for slot, r in enumerate(self.senders)}
        return [self.own if r == self.rank else self.wire.for_peer(slots[r]) for r in sorted(slots)]

    @cached_property
    def packed(self) -> Layout | RawLayout:
        """The same frames, for a buffer that holds only the chunk's elements."""
        starts = accumulate((s.numel for s in self.wire.segments), initial=0)
        segments = [
            Segment(s.codec, s.numel, start, s.peer) for s, start in zip(self.wire.segments, starts)
        ]
        return _layout(segments, self.wire.peers, self.raw)

    def needs_rows(self, reduce: bool) -> bool:
        """Whether it needs room for frames of several ranks, or for copies of its own frame.

        Between two ranks a gather sends its one frame from where it is.
        """
        return reduce or len(self.sources) > 2

    def sink_layout(self, positions: Mapping[str, int]) -> Layout | RawLayout:
        """The layout of this rank's frame, for a sink with its run of each item at a position."""
        segments = [
            Segment(
                p.item.codec, p.numel, positions[p.item.key] + p.start - p.item.bounds[self.rank]
            )
            for p in self.own_pieces
        ]
        return _layout(segments, 1, self.raw)

    def slot_nbytes(self, reduce: bool) -> tuple[int, int]:
        """The bytes of its wire and its rows, in the largest of its hops."""
        wire, rows = self.wire.wire_nbytes, self.rows_nbytes if self.needs_rows(reduce) else 0
        if self.hops is None:
            return wire, rows
        return self.hops.slot_nbytes(wire, reduce)

    def sent_numel(self, reduce: bool, gather: bool) -> int:
        """The elements that this rank sends in a collective with one hop."""
        others = self.numel - self.own.numel if reduce else 0
        return others + (self.own.numel * (self.wire.peers - 1) if gather else 0)

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


class Hops:
    """The smaller chunks of a chunk that makes two hops, there and back."""

    def __init__(self, chunk: Chunk, two_hops: TwoHops) -> None:
        hosts = two_hops.hosts
        # Inside a host all pieces have one codec; nothing else differs.
        inside = [
            p._replace(item=p.item._replace(codec=two_hops.codec), owner=_neighbour(hosts, p.owner))
            for p in chunk.pieces
        ]
        self.local = Chunk(inside, own_last(hosts.neighbours, hosts.rank), 0, chunk.raw)
        across = list(chunk.pieces)  # a rank alone on its host encodes them where they lie
        if not hosts.is_alone:
            # Found by their offsets: items without a parameter, such as padding, share a key.
            summed = {
                p.offset: s.offset for p, s in zip(self.local.own_pieces, self.local.own.segments)
            }
            ours = [p for p in chunk.pieces if _neighbour(hosts, p.owner) == hosts.rank]
            across = [p._replace(offset=summed[p.offset]) for p in ours]
        senders = own_last(hosts.owners, hosts.rank)
        self.across = Chunk(
            across, senders, 0, chunk.raw, sources=hosts.sources, members=hosts.column
        )
        # On the way back each neighbour has the frames of its owners, which go to all the others.
        self.column_nbytes = self.across.wire.wire_nbytes
        self.forwarded_nbytes = self.column_nbytes * (len(hosts.neighbours) - 1)
        columns = _column_nbytes(chunk, hosts)
        # In shared memory they lie behind the frames of `local`: each neighbour's, this one's last.
        self.columns = {r: columns[r] for r in own_last(hosts.neighbours, hosts.rank)}
        self.column_ranks = {r: len(hosts.deputy_for(r)) for r in self.columns}
        self.column_start = -(-self.local.wire.wire_nbytes // 64) * 64
        self.shared_nbytes = self.column_start + max(columns.values())
        self.column_splits = [columns[r] if r != hosts.rank else 0 for r in sorted(columns)]
        self.forward_splits = [
            self.column_nbytes if r != hosts.rank else 0 for r in sorted(columns)
        ]

    def slot_nbytes(self, wire: int, reduce: bool) -> tuple[int, int]:
        rows = max(self.across.rows_nbytes, self.forwarded_nbytes)
        if not reduce:
            return wire, rows
        local = self.local
        return max(wire, local.wire.wire_nbytes), max(rows, local.rows_nbytes)


def _neighbour(hosts: Hosts, owner: int) -> int:
    """The rank of this host that sums what `owner` will own."""
    return hosts.deputy(owner, hosts.host)


def _column_nbytes(chunk: Chunk, hosts: Hosts) -> dict[int, int]:
    """The bytes of each neighbour's column in the whole wire."""
    nbytes = dict.fromkeys(hosts.neighbours, 0)
    for r, frame in zip(chunk.senders, chunk.wire.frame_nbytes):
        nbytes[_neighbour(hosts, r)] += frame
    return nbytes


def own_last(ranks: Iterable[int], rank: int) -> list[int]:
    """The order of a wire's frames: the ranks of a group, this one last."""
    return [*(r for r in sorted(ranks) if r != rank), rank]


def senders_of(rank: int, world_size: int, hosts: Hosts | None = None) -> list[int]:
    """The same for all ranks; with hosts column by column, in the order of neighbours."""
    if hosts is None:
        return own_last(range(world_size), rank)
    neighbours = own_last(hosts.neighbours, rank)
    return [r for n in neighbours for r in own_last(hosts.deputy_for(n), n)]


class ChunkSize(NamedTuple):
    """How much a chunk holds, at most: elements, and bytes on the wire."""

    numel: int
    nbytes: int

    @staticmethod
    def of_mb(fp32_mb: float) -> ChunkSize:
        return ChunkSize(int(fp32_mb * 2**18), int(fp32_mb * 2**20))

    def within(self, most: ChunkSize) -> ChunkSize:
        return ChunkSize(min(self.numel, most.numel), min(self.nbytes, most.nbytes))


class Totals(NamedTuple):
    """What a rank sends in a collective with one hop: there, and back to all."""

    there_numel: int
    back_numel: int
    there_nbytes: int
    back_nbytes: int

    def numel(self, reduce: bool, gather: bool) -> int:
        return reduce * self.there_numel + gather * self.back_numel

    def nbytes(self, reduce: bool, gather: bool) -> int:
        return reduce * self.there_nbytes + gather * self.back_nbytes


class Chunks(tuple[Chunk, ...]):
    """All chunks of a tensor, in order, and what is known of them together."""

    @cached_property
    def largest_nbytes(self) -> int:
        """The bytes of the longest wire."""
        return max((chunk.wire.wire_nbytes for chunk in self), default=0)

    @cached_property
    def shared_nbytes(self) -> int:
        """What the hops inside a host need of a shared slot, if there are two hops."""
        return max((c.hops.shared_nbytes for c in self if c.hops is not None), default=0)

    @cached_property
    def raw(self) -> bool:
        return any(chunk.raw for chunk in self)

    @cached_property
    def only_codec(self) -> Codec | None:
        """The codec of all segments, if they have one."""
        codecs = {p.item.codec for chunk in self for p in chunk.pieces}
        return codecs.pop() if len(codecs) == 1 else None

    @cached_property
    def sums_numel(self) -> int:
        """The most elements that this rank owns of a chunk."""
        return max((chunk.own.numel for chunk in self), default=0)

    @cached_property
    def totals(self) -> Totals:
        return Totals(
            sum(chunk.numel - chunk.own.numel for chunk in self),
            sum(chunk.own.numel * (chunk.wire.peers - 1) for chunk in self),
            sum(chunk.others_nbytes for chunk in self),
            sum(chunk.rows_nbytes for chunk in self),
        )

    # What native code knows of all chunks.

    @cached_property
    def strips(self) -> Any:
        """What each rank owns in the flat tensor, in its order."""
        owned: dict[int, list[tuple[int, int]]] = {r: [] for r in sorted(self[0].senders)}
        for chunk in self:
            for piece in chunk.pieces:
                owned[piece.owner].append((piece.offset, piece.numel))
        return cpu.strips(list(owned.values()))

    @cached_property
    def native(self) -> Any:
        """The layouts of each chunk, for native code; with one hop, not of fp64."""
        layouts: Any = ((chunk.wire, chunk.own) for chunk in self)
        return cpu.coded_chunks(self[0].index, self[0].wire.peers, layouts)

    @cached_property
    def own_strip(self) -> Any:
        """What this rank owns, packed."""
        return cpu.strips([[(0, sum(chunk.own.numel for chunk in self))]])

    @cached_property
    def small_parts(self) -> Any:
        """Each owner's part of the first chunk, packed."""
        parts: Any = ((layout, 0) for layout in self[0].owned_layouts)
        return cpu.owned_parts(parts)

    @cached_property
    def own_parts(self) -> Any:
        """What this rank owns of each chunk, packed."""
        parts: Any = ((chunk.own, chunk.shard_offset) for chunk in self)
        return cpu.owned_parts(parts)


def best_chunk_size(world_size: int) -> ChunkSize:
    """Large enough to hide the fixed cost of a collective, which grows with the ranks; small enough
    that the first and last chunk, which overlap with nothing, are a small part of a large tensor.
    The bytes bound the engine's memory.
    """
    return ChunkSize(min(world_size << 19, MOST_CHUNK_NUMEL), 6 << 20)


def make_chunks(
    items: Sequence[Item],
    rank: int,
    world_size: int,
    size: ChunkSize,
    raw: bool = False,
    two_hops: TwoHops | None = None,
) -> Chunks:
    """Chunks of whole rows of pieces, in the order of the items."""
    senders = senders_of(rank, world_size, two_hops.hosts if two_hops else None)
    chunks: list[Chunk] = []
    pending: list[Piece] = []
    numel = nbytes = shard_offset = 0
    for row in _rows(items, world_size):
        row_numel = sum(p.numel for p in row)
        row_nbytes = sum(_nbytes(p, raw, two_hops) for p in row)
        if pending and (numel + row_numel > size.numel or nbytes + row_nbytes > size.nbytes):
            chunks.append(Chunk(pending, senders, shard_offset, raw, two_hops))
            shard_offset += chunks[-1].own.numel
            pending, numel, nbytes = [], 0, 0
        pending += row
        numel += row_numel
        nbytes += row_nbytes
    if pending:
        chunks.append(Chunk(pending, senders, shard_offset, raw, two_hops))
    return Chunks(chunks)


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
            [
                Piece(item, a, b, r, item.offset_of(r, a))
                for a, b in cut(item.bounds[r], item.bounds[r + 1], limit)
            ]
            for r in range(world_size)
        ]
        for row in zip_longest(*runs):
            yield [piece for piece in row if piece is not None]


def _nbytes(piece: Piece, raw: bool, two_hops: TwoHops | None) -> int:
    """On the wire, in the larger of its hops."""
    if raw:
        return 8 * piece.numel
    codecs = [piece.item.codec, *([two_hops.codec] if two_hops else [])]
    return max(codec.body_nbytes(piece.numel) for codec in codecs)


def _layout(segments: Sequence[Segment], peers: int, raw: bool) -> Layout | RawLayout:
    return RawLayout(segments, peers) if raw else Layout(segments, peers)
