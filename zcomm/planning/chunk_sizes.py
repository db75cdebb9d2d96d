"""The sizes of the engine's chunks, by arithmetic, for any number of ranks.

zcomm.sharding.chunks cuts each owner's run into pieces, and a row has one piece of each owner. Most
owners' runs are as long as each other. So here a row is a few lengths, each with the number of
owners that have a piece of that length; a plan for a million ranks costs no more than one for two.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from zcomm.codecs import Codec
from zcomm.sharding.chunks import ChunkSize, block_of, piece_limit
from zcomm.sharding.owners import Shares, owner_shares, run_of
from zcomm.sharding.settings import Settings
from zcomm.wire.header import HEADER_NBYTES

_RAW_ITEMSIZE = 8  # fp64 travels as it is, without headers


class Owned(NamedTuple):
    """A parameter, what its owners have of it, and this rank's run, elements [start, stop)."""

    codec: Codec
    numel: int
    shares: list[Shares]
    start: int
    stop: int


class Owners(NamedTuple):
    """The parameters by name, as one rank sees them."""

    rank: int
    parameters: dict[str, Owned]


def owners_of(
    named: Mapping[str, Tensor], settings: Settings, world_size: int, rank: int | None
) -> Owners:
    """As zcomm.ddp.parameters.items_of; without `rank`, for the first of those that own most."""
    codecs = {name: settings.codec_of(name, p.numel()) for name, p in named.items()}
    sizes = [(p.numel(), block_of(codecs[name])) for name, p in named.items()]
    ownership = owner_shares(sizes, world_size)
    if rank is None:
        rank = max(ownership.total, key=lambda shares: shares.numel).start
    return Owners(
        rank,
        {
            name: Owned(codecs[name], p.numel(), shares, *run_of(shares, rank))
            for (name, p), shares in zip(named.items(), ownership.parameters)
        },
    )


class SizedChunk(NamedTuple):
    """A chunk of which only the sizes are known: of all frames, and of this rank's own."""

    world_size: int
    numel: int = 0
    nbytes: int = 0
    own_numel: int = 0
    own_nbytes: int = 0
    topk_numel: int = 0

    @property
    def rows_nbytes(self) -> int:
        """A frame as long as this rank's own from each other rank."""
        return self.own_nbytes * (self.world_size - 1)

    def needs_rows(self, reduce: bool) -> bool:
        """As zcomm.sharding.chunks.Chunk.needs_rows."""
        return reduce or self.world_size > 2

    def plus(self, row: "SizedChunk") -> "SizedChunk":
        return SizedChunk(self.world_size, *(a + b for a, b in zip(self[1:], row[1:])))


def size_chunks(
    parameters: Sequence[Owned], world_size: int, size: ChunkSize, raw: bool = False
) -> list[SizedChunk]:
    """The chunks that zcomm.sharding.chunks.make_chunks would make, with one hop."""
    chunks: list[SizedChunk] = []
    pending = empty = SizedChunk(world_size)
    for row in _rows(parameters, world_size, raw):
        full = pending.plus(row)
        if pending.numel and (full.numel > size.numel or full.nbytes > size.nbytes):
            chunks.append(pending)
            full = row
        pending = full
    if pending is not empty:
        chunks.append(pending)
    header = 0 if raw else HEADER_NBYTES
    return [
        c._replace(nbytes=c.nbytes + header * world_size, own_nbytes=c.own_nbytes + header)
        for c in chunks
    ]


def _rows(parameters: Sequence[Owned], world_size: int, raw: bool) -> Iterator[SizedChunk]:
    """The n-th pieces of all owners, for n = 0, 1, ..., without headers."""
    for one in parameters:
        limit = piece_limit(one.codec, world_size)
        longest = max(shares.numel for shares in one.shares)
        for at in range(0, longest, limit):
            yield _row(one, at, limit, world_size, raw)


def _row(one: Owned, at: int, limit: int, world_size: int, raw: bool) -> SizedChunk:
    def piece(run: int) -> int:
        return max(min(run - at, limit), 0)

    def nbytes(numel: int) -> int:
        if not numel:
            return 0
        return _RAW_ITEMSIZE * numel if raw else one.codec.body_nbytes(numel)

    pieces = [(piece(numel), stop - start) for start, stop, numel in one.shares]
    own = piece(one.stop - one.start)
    total = sum(numel * count for numel, count in pieces)
    topk = total if one.codec.name == "topk" else 0
    whole = sum(nbytes(numel) * count for numel, count in pieces)
    return SizedChunk(world_size, total, whole, own, nbytes(own), topk)
