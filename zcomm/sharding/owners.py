"""Ownership: which rank owns which run of each parameter. Pure arithmetic.

A parameter is cut at block boundaries into one contiguous run per rank. Runs differ by at most one
block, and the longer ones go to the ranks that own least so far. So every bucket has work for every
rank, shards are even, and nothing moves when DDP makes new buckets.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

# Elements of one row of pieces, one piece for each rank: what a chunk is made of. A power of two
# above any block size; small enough that rows of many ranks still fit a chunk.
_ROW_NUMEL = 1 << 16
_LEAST_PIECE = 1 << 12


class Shares(NamedTuple):
    """Ranks [start, stop) that own `numel` elements each.

    However many ranks there are, a parameter has few of these.
    """

    start: int
    stop: int
    numel: int


class Ownership(NamedTuple):
    """The ranks' shares, in the order of ranks: of each parameter, and of all together."""

    parameters: list[list[Shares]]
    total: list[Shares]


def owner_bounds(sizes: Iterable[tuple[int, int]], world_size: int) -> list[tuple[int, ...]]:
    """For each (numel, block) world_size + 1 bounds: rank r owns bounds[r]:bounds[r + 1]."""
    return [tuple(_bounds(shares)) for shares in owner_shares(sizes, world_size).parameters]


def owner_shares(sizes: Iterable[tuple[int, int]], world_size: int) -> Ownership:
    """How many elements of each (numel, block) each rank owns."""
    parameters: list[list[Shares]] = []
    loads = [Shares(0, world_size, 0)]  # all that ranks own so far, those that own least first
    for numel, block in sizes:
        each, extra = divmod(-(-numel // block), world_size)
        first, others = _split(loads, extra)
        added = [(load, (each + 1) * block) for load in first] + [
            (load, each * block) for load in others
        ]
        # The last block of the parameter may be short. It is the last rank's that owns any.
        last = max((load.stop for load, count in added if count), default=0) - 1
        added = list(_shortened(added, last, -numel % block))
        parameters.append(_merged(sorted(Shares(s.start, s.stop, n) for s, n in added)))
        loads = [Shares(s.start, s.stop, s.numel + n) for s, n in added]
        loads = _merged(sorted(loads, key=lambda s: (s.numel, s.start)))
    return Ownership(parameters, _merged(sorted(loads)))


def run_of(shares: Sequence[Shares], rank: int) -> tuple[int, int]:
    """The elements [start, stop) that a rank owns."""
    before = [one for one in shares if one.stop <= rank]
    start, _, numel = shares[len(before)]
    at = sum((one.stop - one.start) * one.numel for one in before) + (rank - start) * numel
    return at, at + numel


def _split(shares: Iterable[Shares], count: int) -> tuple[list[Shares], list[Shares]]:
    """The first `count` ranks, and the others."""
    first: list[Shares] = []
    others: list[Shares] = []
    for start, stop, numel in shares:
        middle = min(start + count, stop)
        count -= middle - start
        if start < middle:
            first.append(Shares(start, middle, numel))
        if middle < stop:
            others.append(Shares(middle, stop, numel))
    return first, others


def _shortened(
    added: Iterable[tuple[Shares, int]], last: int, missing: int
) -> Iterator[tuple[Shares, int]]:
    """What ranks get, with `missing` elements less for rank `last`."""
    for shares, numel in added:
        if shares.stop - 1 != last or not missing:
            yield shares, numel
            continue
        if shares.start < last:
            yield shares._replace(stop=last), numel
        yield shares._replace(start=last), numel - missing


def _merged(shares: Iterable[Shares]) -> list[Shares]:
    """Neighbors that own as much become one."""
    merged: list[Shares] = []
    for one in shares:
        if merged and (merged[-1].stop, merged[-1].numel) == (one.start, one.numel):
            one = merged.pop()._replace(stop=one.stop)
        merged.append(one)
    return merged


def _bounds(shares: Iterable[Shares]) -> Iterator[int]:
    at = 0
    yield at
    for start, stop, numel in shares:
        for _ in range(start, stop):
            at += numel
            yield at


def even_bounds(numel: int, world_size: int) -> tuple[int, ...]:
    """Runs of `numel` elements each: what a reduce-scatter of torch means."""
    return tuple(r * numel for r in range(world_size + 1))


def piece_numel(world_size: int, rows: int = 1) -> int:
    """The longest piece: a row of them, one for each rank, has `rows` times 65,536 elements.

    A piece is never cut. It depends on nothing but the number of ranks, so what is decided once per
    piece (topk's selection, whether it is idle) does not depend on buckets or chunks.
    """
    ranks = 1 << (world_size - 1).bit_length()
    return max(_ROW_NUMEL // ranks, _LEAST_PIECE) * rows


def cut(start: int, stop: int, limit: int) -> list[tuple[int, int]]:
    """[start, stop) in pieces of `limit`, the last one shorter."""
    return [(at, min(at + limit, stop)) for at in range(start, stop, limit)]
