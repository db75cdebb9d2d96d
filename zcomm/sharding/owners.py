"""Ownership: which rank owns which run of each parameter. Pure arithmetic.

A parameter is cut at block boundaries into one contiguous run per rank. Runs differ by at most one
block, and the longer ones go to the ranks that own least so far. So every bucket has work for every
rank, shards are even, and nothing moves when DDP makes new buckets.
"""

from collections.abc import Iterable
from itertools import accumulate

# Elements of one row of pieces, one piece for each rank: what a chunk is made of. A power of two
# above any block size; small enough that rows of many ranks still fit a chunk.
_ROW_NUMEL = 1 << 16
_LEAST_PIECE = 1 << 12


def owner_bounds(sizes: Iterable[tuple[int, int]], world_size: int) -> list[tuple[int, ...]]:
    """For each (numel, block) world_size + 1 bounds: rank r owns bounds[r]:bounds[r + 1]."""
    loads = [0] * world_size
    bounds: list[tuple[int, ...]] = []
    for numel, block in sizes:
        blocks = -(-numel // block)
        each, extra = divmod(blocks, world_size)
        longer = set(sorted(range(world_size), key=lambda r: (loads[r], r))[:extra])
        counts = [each + (r in longer) for r in range(world_size)]
        cuts = [min(c * block, numel) for c in accumulate(counts, initial=0)]
        bounds.append(tuple(cuts))
        loads = [load + cuts[r + 1] - cuts[r] for r, load in enumerate(loads)]
    return bounds


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
