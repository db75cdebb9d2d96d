"""Bits: the same on all ranks, and independent of buckets, chunks, threads and DDP's rebuild."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import WAYS
from everyones import everyones
from ranks import World, run_ranks
from zcomm.codecs import SPECS

CODECS = [*SPECS[:-1], "topk:0.02", "int4:block=32"]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[World]:
    with World(2) as world:
        yield world


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[World]:
    with World(3) as world:
        yield world


def model(width: int = 96) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width, bias=False), nn.Tanh()),
        *(nn.LayerNorm(width), nn.Linear(width, 7)),
    )


def train(
    rank: int, ddp: DistributedDataParallel, steps: int, optimizer: type[Any] = torch.optim.AdamW
) -> Tensor:
    """All parameters after a few steps on this rank's own data."""
    opt = optimizer(ddp.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1000 + rank)
    for _ in range(steps):
        x = torch.randn(8, 32, generator=generator)
        opt.zero_grad()
        nn.functional.cross_entropy(ddp(x), x[:, :7].argmax(1)).backward()
        opt.step()
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])


def equal_on_all_ranks(t: Tensor) -> bool:
    return all(torch.equal(t, other) for other in everyones(t))


def replicas_after_200_steps(rank: int, world_size: int) -> dict[tuple[str, Any], bool]:
    found = {}
    for codec in CODECS:
        for feedback in (True, 0.8, None):
            ddp = DistributedDataParallel(model())
            handle = zcomm.compress(ddp, codec, feedback=feedback, min_numel=0)
            parameters = train(rank, ddp, 200 if feedback is None else 20)
            finite = bool(parameters.isfinite().all())
            found[codec, feedback] = finite and equal_on_all_ranks(parameters)
            handle.close()
    return found


def test_replicas_are_identical_after_200_steps(three_ranks: World) -> None:
    for found in three_ranks.run(replicas_after_200_steps, timeout_s=400):
        assert len(found) == 3 * len(CODECS)
        assert all(found.values()), found


def train_in_many_ways(rank: int, world_size: int, codec: str, mode: Any) -> dict[str, Tensor]:
    found = {}
    for name, (of_ddp, of_zcomm) in WAYS.items():
        # A width that gives each owner several pieces, and not a whole number of blocks.
        ddp = DistributedDataParallel(model(width=437), **of_ddp)
        handle = zcomm.compress(ddp, codec, feedback=mode, **of_zcomm)
        found[name] = train(rank, ddp, 6)
        handle.close()
    return found


@pytest.mark.parametrize(
    ("codec", "mode"),
    [
        *(("none", None), ("int8", True), ("lm4", True), ("lm2", 0.8), ("sign", True)),
        ("topk:0.02", True),
    ],
)
def test_no_bit_depends_on_buckets_chunks_or_threads(
    three_ranks: World, codec: str, mode: Any
) -> None:
    for found in three_ranks.run(train_in_many_ways, codec, mode):
        first = found["one bucket"]
        assert first.isfinite().all()
        for name, parameters in found.items():
            assert torch.equal(first, parameters), name


# A plain hook to compare with: every rank gathers all gradients and sums them in rank order.


# Without annotations: torch refuses string annotations here.
def rank_order_hook(state, bucket):  # type: ignore[no-untyped-def]
    world_size, mine = dist.get_world_size(), bucket.buffer()
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine)
    total = everyone[0] * (1 / world_size)
    for other in everyone[1:]:
        total = total + other * (1 / world_size)
    future: Any = torch.futures.Future()
    future.set_result(total)
    return future


def compare_none(rank: int, world_size: int) -> None:
    plain = DistributedDataParallel(model())
    by_hand = DistributedDataParallel(model())
    by_hand.register_comm_hook(None, rank_order_hook)
    ours = DistributedDataParallel(model())
    zcomm.compress(ours, "none")
    trained = [train(rank, ddp, 30, torch.optim.SGD) for ddp in (plain, by_hand, ours)]
    assert torch.equal(trained[1], trained[2])
    if world_size == 2:
        assert torch.equal(trained[0], trained[2])
    _compare_gradients(rank, world_size)


def _compare_gradients(rank: int, world_size: int) -> None:
    """|difference from gloo's result| <= 2 (W - 1) 2^-24 sum |g| / W, per element."""
    plain, ours = DistributedDataParallel(model()), DistributedDataParallel(model())
    zcomm.compress(ours, "none")
    local = model()
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))
    for m in (plain, ours, local):
        nn.functional.cross_entropy(m(x), x[:, :7].argmax(1)).backward()
    for p, q, g in zip(plain.parameters(), ours.parameters(), local.parameters()):
        magnitude = g.grad.abs()
        dist.all_reduce(magnitude)
        bound = 2 * (world_size - 1) * 2.0**-24 * magnitude / world_size
        assert ((p.grad - q.grad).abs() <= bound).all()


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_none_is_ddp_with_sums_in_rank_order(
    world_size: int, two_ranks: World, three_ranks: World
) -> None:
    if world_size == 5:
        run_ranks(world_size, compare_none)
    else:
        (two_ranks if world_size == 2 else three_ranks).run(compare_none)


def same_run_twice(rank: int, world_size: int) -> bool:
    found = []
    for _ in range(2):
        ddp = DistributedDataParallel(model(), bucket_cap_mb=0.05)
        zcomm.compress(ddp, "lm3", feedback=True)
        found.append(train(rank, ddp, 10))
    return torch.equal(*found)


def test_every_run_gives_the_same_bits(two_ranks: World) -> None:
    assert all(two_ranks.run(same_run_twice))
