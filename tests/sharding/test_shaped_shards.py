"""A run of a tensor in the order of its memory, as blocks of the tensor."""

from __future__ import annotations

import copy
import pickle
from itertools import permutations
from math import prod

import pytest
import torch

from zcomm.sharding.shaped_shards import ShapedShard, blocks_of_run


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (5, 1), (3, 2, 4), (2, 1, 3, 2)])
def test_blocks_cover_a_run_exactly(shape: tuple[int, ...]) -> None:
    """Every run, in every order of memory."""
    numel = prod(shape)
    for order in permutations(range(len(shape))):
        memory = torch.arange(numel)
        back = sorted(range(len(order)), key=order.__getitem__)
        whole = memory.view([shape[dim] for dim in order]).permute(back)
        for start, stop in ((i, j) for i in range(numel + 1) for j in range(i, numel + 1)):
            shard = ShapedShard.cut(memory[start:stop], start, whole.shape, whole.stride())
            assert shard.size() == whole.shape
            covered = torch.full(shape, -1)
            for at, block in shard.blocks().items():
                place = tuple(slice(a, a + n) for a, n in zip(at, block.shape))
                assert (covered[place] == -1).all()
                covered[place] = block
            assert torch.equal(covered, torch.where((whole >= start) & (whole < stop), whole, -1))


def test_a_run_is_few_blocks() -> None:
    assert list(blocks_of_run((4, 5), 3, 17)) == [
        ((0, 3), (1, 2)),
        ((1, 0), (2, 5)),
        ((3, 0), (1, 2)),
    ]
    assert (
        max(len([*blocks_of_run((9, 8, 7), a, b)]) for a in range(0, 504, 5) for b in range(504))
        == 5
    )


def test_a_shard_stays_one_when_it_is_copied_pickled_and_moved() -> None:
    shard = ShapedShard.cut(torch.arange(20.0)[3:9], 3, (4, 5), (5, 1))
    for one in (copy.deepcopy(shard), pickle.loads(pickle.dumps(shard)), shard.to("cpu")):
        assert isinstance(one, ShapedShard)
        assert (one.start, one.size(), one.strides) == (3, (4, 5), (5, 1))
        assert torch.equal(one.part(), shard.part())
