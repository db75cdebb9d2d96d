"""DDP on one to five ranks, on some of the ranks, and with ranks that run out of data (Join)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import (
    LM4,
    ROUNDING,
    Books,
    Net,
    Outcome,
    assert_bit_equal,
    assert_equal_replicas,
    batch,
    outcome,
    seeded,
    train,
)
from ranks import World


@pytest.fixture(scope="module")
def five() -> Iterator[World]:
    with World(5) as world:
        yield world


def train_on_first(rank: int, world_size: int, count: int, feedback: bool) -> Any:
    group = dist.new_group(range(count))
    if rank >= count:
        return None
    ddp = DistributedDataParallel(seeded(Net), process_group=group, bucket_cap_mb=0.02)
    handle = zcomm.compress(ddp, **{**LM4, "feedback": feedback})
    trained = train(ddp, rank, handle)
    return trained, handle.stats()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_any_number_of_ranks(five: World, count: int) -> None:
    results = [result for result in five.run(train_on_first, count, True) if result]
    assert len(results) == count
    assert_equal_replicas([trained for trained, _ in results])
    raw_bytes = 4 * 4 * sum(p.numel() for p in Net().parameters())  # fp32, four steps
    for trained, stats in results:
        assert stats.steps == 4
        assert trained.gap < ROUNDING if count > 1 else trained.gap == 0
    assert sum(stats.raw_bytes for _, stats in results) == 2 * (count - 1) * raw_bytes


def train_apart(rank: int, world_size: int) -> Outcome | float:
    """Ranks 4 and 2 train; meanwhile the others use their own group."""
    mine, others = dist.new_group([2, 4]), dist.new_group([0, 1, 3])
    if rank in (2, 4):
        ddp = DistributedDataParallel(seeded(Net), process_group=mine)
        return train(ddp, rank, zcomm.compress(ddp, **LM4))
    total = torch.ones((), dtype=torch.float64)
    for _ in range(20):
        dist.all_reduce(total, group=others)
    return total.item()


def test_some_of_the_ranks(five: World) -> None:
    results = five.run(train_apart)
    trained = [results.pop(4), results.pop(2)]
    assert_equal_replicas(trained)
    assert all(0 < outcome.gap < ROUNDING for outcome in trained)
    assert results == [3.0**20] * 3


def join_uneven(rank: int, world_size: int, count: int, codec: str | None, unused: bool) -> Any:
    """Rank r has 2 + 2 * r batches; a rank that has joined contributes zero gradients."""
    group = dist.new_group(range(count))
    if rank >= count:
        return None
    ddp = DistributedDataParallel(
        seeded(Net), process_group=group, bucket_cap_mb=0.02, find_unused_parameters=unused
    )
    handle = zcomm.compress(ddp, codec, feedback=True, chunk_mb=1 / 16) if codec else None
    books = Books(ddp, handle) if handle else None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    with Join([ddp]):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            if books:
                books.close_step()
            optimizer.step()
    return outcome(ddp, books), handle.stats().steps if handle else 0


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_join_with_uneven_inputs_loses_nothing(five: World, count: int, unused: bool) -> None:
    results = five.run(join_uneven, count, "lm4", unused)[:count]
    for trained, steps in results:
        assert_bit_equal(trained.parameters, results[0][0].parameters)
        assert steps == 2 * count
    assert results[-1][0].gap < ROUNDING  # the last rank saw everything that arrived


def test_join_without_a_codec_is_plain_ddp_bit_for_bit(five: World) -> None:
    plain, uncompressed = (five.run(join_uneven, 2, codec, False) for codec in (None, "none"))
    for rank in range(2):
        assert_bit_equal(uncompressed[rank][0].parameters, plain[rank][0].parameters)
        assert_bit_equal(uncompressed[rank][0].gradients, plain[rank][0].gradients)


def join_divided_by_those_present(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(seeded(Net))
    zcomm.compress(ddp, **LM4)
    try:
        with Join([ddp], divide_by_initial_world_size=False):
            ddp(batch(rank, 0)).square().mean().backward()
    except ValueError as error:
        return str(error)
    return "trained"


def test_join_that_divides_by_the_ranks_present_is_refused(five: World) -> None:
    for rank, message in enumerate(five.run(join_divided_by_those_present, timeout_s=200)):
        assert message.startswith(f"rank {rank}: expected Join with divide_by_initial_world_size=T")


def join_with_a_scaler(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(seeded(Net))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    zcomm.compress(ddp, **LM4, scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    try:
        with Join([ddp]):
            for step in range(5 if rank else 1):
                optimizer.zero_grad()
                scaler.scale(ddp(batch(rank, step)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
    except ValueError as error:
        return str(error)
    return "trained"


def test_a_loss_scale_that_a_joined_rank_does_not_follow_is_an_error(five: World) -> None:
    """A rank that has joined takes no steps, so its scaler falls behind."""
    for rank, message in enumerate(five.run(join_with_a_scaler, timeout_s=200)):
        assert message.startswith(f"rank {rank}: expected the same call on all ranks, got rank 0")
        assert "loss scale 8.0; rank 1" in message
        assert "loss scale 16.0" in message
