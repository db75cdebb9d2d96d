"""Rows of `zcomm bench`: the timings of all ranks and rounds, combined and checked.

A round takes as long as its slowest rank. A time is the median of the rounds; a speedup is the
ratio of two such times, so that it agrees with them.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import zcomm
from zcomm.cli.bench.collective_tasks import Key, Timing, Timings, shard_numel_of
from zcomm.engine.tuning.cost import ENCODINGS, OWN
from zcomm.sharding.chunks import Chunk, Item, TwoHops, best_chunk_size, block_of, make_chunks
from zcomm.sharding.hierarchy import hosts_of
from zcomm.sharding.owners import even_bounds, owner_bounds

OWN_ERROR = 1e-12  # the backend's own collectives round their sums
ERRORS_BLOCK = 128
ROOM = 1.2
# Small tensors scatter around the expected error: 4096 elements may exceed it by this share, other
# sizes in inverse proportion to the square root of their size.
SMALL_ROOM, SMALL_NUMEL = 0.3, 4096


@dataclass(frozen=True)
class Row:
    """One collective of one size with one codec, over all rounds and ranks."""

    kind: str
    codec: str  # OWN for the backend's own collective
    nbytes: int
    ranks: int
    wire_nbytes: int  # bytes that a rank sends
    seconds: list[float]  # one per round
    cpu_s: float  # median of the rounds, mean of the ranks
    speedup: float  # over the backend's own
    sent: list[float]  # bytes at the interface, mean of the ranks
    error: float
    wrong: int  # rounds whose result was too far off, or differed between ranks

    @property
    def s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the range of the rounds, relative to the median."""
        return (max(self.seconds) - min(self.seconds)) / 2 / self.s

    @property
    def algbw(self) -> float:
        return self.nbytes / self.s

    @property
    def busbw(self) -> float:
        """The least a link carries, uncompressed, for this time; see docs/bandwidth.md."""
        return self.algbw * ENCODINGS[self.kind] * (self.ranks - 1) / self.ranks


def rows_of(nbytes: int, by_rank: Sequence[Timings], per_host: int = 1) -> Iterator[Row]:
    """The rows of one size. Each kind of collective has the backend's own among its keys."""
    ranks = len(by_rank)
    rounds = {key: list(zip(*(samples[key] for samples in by_rank))) for key in by_rank[0]}
    slowest = {key: [max(one.s for one in turn) for turn in rounds[key]] for key in rounds}
    own_s = {key.kind: statistics.median(s) for key, s in slowest.items() if key.codec == OWN}
    for key, turns in rounds.items():
        yield Row(
            kind=key.kind,
            codec=key.codec,
            nbytes=4 * ranks * shard_numel_of(nbytes, ranks),
            ranks=ranks,
            wire_nbytes=wire_nbytes(key, nbytes, ranks, per_host),
            seconds=slowest[key],
            cpu_s=statistics.median(statistics.mean(one.cpu_s for one in turn) for turn in turns),
            speedup=own_s[key.kind] / statistics.median(slowest[key]),
            sent=[statistics.mean(one.sent for one in turn) for turn in turns],
            error=max(one.error for turn in turns for one in turn),
            wrong=sum(is_wrong(key, nbytes, turn) for turn in turns),
        )


def median_ratio(over: Iterable[float], under: Iterable[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under))


def wire_nbytes(key: Key, nbytes: int, world_size: int, per_host: int = 1) -> int:
    """The bytes that rank 0 sends, without TCP's overhead, counted from the engine's chunks. In
    shared memory chunks are shorter, and have a few more headers.

    The backends' own collectives are rings: each rank passes on all parts but one, in each phase.
    """
    kind = key.kind
    shard = shard_numel_of(nbytes, world_size)
    if key.codec == OWN:
        return 4 * shard * (world_size - 1) * ENCODINGS[kind]
    codec = zcomm.codec(key.across)
    bounds = even_bounds(shard, world_size)
    if kind == "all_reduce":
        bounds = owner_bounds([(shard * world_size, block_of(codec))], world_size)[0]
    item = Item("", codec, bounds[-1], 0, bounds)
    hosts = hosts_of([str(r // per_host) for r in range(world_size)], 0)
    two_hops = None
    if hosts is not None and not key.is_flat:
        two_hops = TwoHops(hosts, zcomm.codec(key.local or "none"))
    size = best_chunk_size(world_size)
    chunks = make_chunks([item], 0, world_size, size, two_hops=two_hops)
    first = sum(map(reduced_nbytes, chunks)) if kind != "all_gather" else 0
    second = sum(map(gathered_nbytes, chunks)) if kind != "reduce_scatter" else 0
    return first + second


def reduced_nbytes(chunk: Chunk) -> int:
    """Bytes to the owners."""
    if chunk.hops is None:
        return chunk.others_nbytes
    return chunk.hops.local.others_nbytes + chunk.hops.across.others_nbytes


def gathered_nbytes(chunk: Chunk) -> int:
    """Bytes from the owners."""
    if chunk.hops is None:
        return chunk.rows_nbytes
    return chunk.hops.across.rows_nbytes + chunk.hops.forwarded_nbytes


def error_bound(key: Key, nbytes: int) -> float:
    error = ENCODINGS[key.kind] * encoding_error(key.across)
    if key.local and key.kind != "all_gather":
        error += encoding_error(key.local)
    room: float = ROOM + SMALL_ROOM * (SMALL_NUMEL * 4 / nbytes) ** 0.5
    return min(1.0, room * error)


def encoding_error(spec: str) -> float:
    if spec == OWN:
        return OWN_ERROR
    codec = zcomm.codec(spec)
    # The largest of more values is larger, and so are the steps of a block's scale.
    growth: float = max(1.0, codec.block / ERRORS_BLOCK) ** 0.2
    return codec.error * growth


def is_wrong(key: Key, nbytes: int, of_ranks: Sequence[Timing]) -> bool:
    # NaN must count as wrong.
    too_far = any(not (one.error <= error_bound(key, nbytes)) for one in of_ranks)
    differ = key.kind != "reduce_scatter" and len({one.digest for one in of_ranks}) > 1
    return too_far or differ
