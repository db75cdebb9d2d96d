"""Owners and chunks by arithmetic, against those that the engine makes rank by rank."""

from __future__ import annotations

import random
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from torch import nn

from zcomm.ddp.parameters import items_of
from zcomm.planning.chunk_sizes import SizedChunk, owners_of, size_chunks
from zcomm.sharding.chunks import Chunk, make_chunks
from zcomm.sharding.owners import owner_bounds, owner_shares
from zcomm.sharding.settings import Settings

SIZES = (0, 1, 127, 128, 129, 5000, 70_001, 300_000, 2_000_000)


def bounds_rank_by_rank(sizes: list[tuple[int, int]], world_size: int) -> list[tuple[int, ...]]:
    """The rule of zcomm.sharding.owners, in the simplest form."""
    loads = [0] * world_size
    bounds = []
    for numel, block in sizes:
        each, extra = divmod(-(-numel // block), world_size)
        longer = sorted(range(world_size), key=lambda r: (loads[r], r))[:extra]
        counts = [each + (r in longer) for r in range(world_size)]
        cuts = [min(c * block, numel) for c in accumulate(counts, initial=0)]
        bounds.append(tuple(cuts))
        loads = [load + cuts[r + 1] - cuts[r] for r, load in enumerate(loads)]
    return bounds


def test_owners_are_those_of_the_rule() -> None:
    chance = random.Random(0)
    for _ in range(500):
        world_size = chance.choice((1, 2, 3, 5, 8, 33))
        drawn = [chance.choice((*SIZES[:6], chance.randrange(9000))) for _ in range(9)]
        sizes = [(numel, chance.choice((1, 64, 128))) for numel in drawn]
        expected = bounds_rank_by_rank(sizes, world_size)
        assert owner_bounds(sizes, world_size) == expected
        total = [s.numel for s in owner_shares(sizes, world_size).total for _ in range(*s[:2])]
        ends = [[cuts[r + 1] - cuts[r] for cuts in expected] for r in range(world_size)]
        assert total == [sum(owned) for owned in ends]


def sized(chunk: Chunk) -> SizedChunk:
    topk = sum(p.numel for p in chunk.pieces if p.item.codec.name == "topk")
    own = (chunk.own.numel, chunk.own_nbytes)
    return SizedChunk(len(chunk.senders), chunk.numel, chunk.wire.wire_nbytes, *own, topk)


@pytest.mark.parametrize(
    "settings",
    [
        {"codec": "lm4"},
        {"codec": "none", "chunk_mb": 0.5},
        {"codec": {"3": "topk:0.01", "*": "int8"}, "min_numel": 0},
    ],
    ids=str,
)
def test_sizes_are_those_of_the_engines_chunks(settings: dict[str, Any]) -> None:
    with torch.device("meta"):
        named: Any = {f"{i}": nn.Parameter(torch.empty(n)) for i, n in enumerate(SIZES)}
    checked = Settings(**settings)
    for world_size, raw in product((1, 2, 3, 8, 64), (False, True)):
        size = checked.chunk_size(world_size)
        items = items_of(named, checked, world_size).values()
        offsets = accumulate((item.numel for item in items), initial=0)
        placed = [item._replace(offset=at) for item, at in zip(items, offsets)]
        for rank in {0, world_size - 1}:
            owned = owners_of(named, checked, world_size, rank).parameters.values()
            made = make_chunks(placed, rank, world_size, size, raw)
            sizes = size_chunks(list(owned), world_size, size, raw)
            assert sizes == [sized(chunk) for chunk in made]
            for chunk, one in zip(made, sizes):
                assert one.rows_nbytes == chunk.rows_nbytes
                assert one.needs_rows(False) == chunk.needs_rows(False)
