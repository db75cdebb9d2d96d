"""Calls of ranks that share memory: different ones are refused, and groups take any order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import Net, batch, seeded
from dying_ranks import at
from everyones import everyones
from raised import Raised, raised
from ranks import World, run_ranks
from segment_party import mapped_segments, open_fds
from shared_ranks import engine_of, group_over, in_chunks, over, ring_of, same_bits
from zcomm import kernels
from zcomm.transport.shared_memory import ring
from zcomm.transport.shared_memory.ring import Ring
from zcomm.transport.shared_memory.segment import NoSharedMemory

LM4_SLOT = 40 << 10


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[World]:
    with World(3) as world:
        yield world


# Ranks that disagree.

Call = Callable[[Any], object]


def all_reduce(n: int, codec: str, dtype: torch.dtype = torch.float32, **options: Any) -> Call:
    return lambda group: zcomm.all_reduce(torch.ones(n, dtype=dtype), codec, group, **options)


def all_gather(n: int, codec: str) -> Call:
    return lambda group: zcomm.all_gather(torch.empty(3 * n), torch.ones(n), codec, group)


DIFFERENT: dict[str, tuple[Call, Call]] = {
    "codec": (all_reduce(5000, "lm4"), all_reduce(5000, "int8")),
    "plain codec": (all_reduce(5000, "none"), all_reduce(5000, "bf16")),
    "size": (all_reduce(5000, "none"), all_reduce(4000, "none")),
    "op": (all_reduce(5000, "none"), all_reduce(5000, "none", op="sum")),
    "dtype": (all_reduce(5000, "lm4"), all_reduce(5000, "lm4", torch.bfloat16)),
    "collective": (all_reduce(5000, "none"), all_gather(5000, "none")),
    "plain, chunks": (all_reduce(5000, "none"), all_reduce(300_000, "lm4")),
    "chunks, plain": (all_reduce(300_000, "lm4"), all_reduce(300_000, "none")),
    "chunks, nothing": (all_reduce(300_000, "lm4"), all_reduce(0, "lm4")),
    "nothing, plain": (all_reduce(0, "none"), all_reduce(5000, "none")),
    "fp64": (all_reduce(5000, "none"), all_reduce(5000, "none", torch.float64)),
    "fits, does not fit": (all_reduce(5000, "lm4"), all_reduce(300_000, "int8")),
    "does not fit, nothing": (all_reduce(300_000, "int8"), all_reduce(0, "none")),
}


def differ(rank: int, world_size: int, late: int | None) -> dict[str, Raised]:
    found = {}
    for name, (common, other) in DIFFERENT.items():
        group = group_over("ring", range(3), LM4_SLOT, 20.0)
        if rank == late:
            time.sleep(0.2)
        found[name] = raised(other if rank == 2 else common, group)
    return found


@pytest.mark.parametrize("late", [None, 0, 1, 2])
def test_calls_that_differ_are_refused_on_all_ranks(three_ranks: World, late: int | None) -> None:
    for rank, found in enumerate(three_ranks.run(differ, late)):
        for name, error in found.items():
            assert error.is_value_error, (name, error.text)
            start = f"rank {rank}: expected the same call on all ranks, got rank 0: all_reduce("
            assert error.text.startswith(start), (name, error.text)
            assert "; rank 1: all_reduce(" in error.text, (name, error.text)
            assert "; rank 2: all_" in error.text, (name, error.text)
            assert error.seconds < 4, (name, error.seconds)


# Jobs that leave the ring, and groups side by side.


def data(rank: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * seed + rank))


def leave_the_ring(rank: int, world_size: int) -> None:
    """Jobs of all kinds that are under way together, over both."""
    ring, gloo = (group_over(way, range(3), LM4_SLOT) for way in ("ring", "gloo"))
    kinds = [("lm4", 300_000), ("int8", 300_000), ("none", 50_000), ("fp64", 50_000), ("lm4", 9)]
    kinds += [("topk:0.5", 1_200_000), ("none", 0), ("lm4", 70_000), ("fp64", 3)]
    results, shared = [], []
    for group in (ring, gloo):
        made = []
        for i, (spec, n) in enumerate(3 * kinds):
            x = data(rank, n, i)
            x = x.double() if spec == "fp64" else x
            feedback = zcomm.Feedback() if spec.startswith("topk") else None
            codec = "none" if spec == "fp64" else spec
            made.append((x, zcomm.all_reduce(x, codec, group, feedback, async_op=True)))
        for _, work in made:
            assert work is not None
            work.wait()
        counters = engine_of(group).counters
        shared.append(counters.shared_bytes / counters.wire_bytes)
        results.append([x for x, _ in made])
    assert all(map(same_bits, *results))
    assert 0.0 == shared[1] < shared[0] < 0.5


def test_jobs_that_do_not_fit_go_over_gloo_and_later_ones_over_the_ring(
    three_ranks: World,
) -> None:
    three_ranks.run(leave_the_ring)


def reduce_in_any_order(rank: int, world_size: int) -> None:
    """Four groups, two of which overlap; each rank submits to its own in another order."""
    members = [(0, 1, 2), (0, 1), (1, 2), (0, 1, 2)]
    groups = [(ranks, group_over("ring", ranks, 4096)) for ranks in members]
    mine = [(ranks, group) for ranks, group in groups if group is not None]
    for step in range(10):
        turned = (rank + step) % len(mine)
        started = []
        for ranks, group in mine[turned:] + mine[:turned]:
            for codec in ("none", "lm4"):
                x = torch.full((20_000 + step,), float(rank))
                work = zcomm.all_reduce(x, "none", group, async_op=True, op="sum")
                started.append((codec, x, work, sum(ranks)))
        for _, x, work, total in reversed(started):
            work.wait()
            assert (x == total).all()


def test_groups_take_their_jobs_in_any_order(three_ranks: World) -> None:
    three_ranks.run(reduce_in_any_order)


def train_two_models(rank: int, world_size: int) -> None:
    """In one backward pass, so that their buckets come as they may."""
    with over("ring", LM4_SLOT):
        models = [DistributedDataParallel(seeded(Net), bucket_cap_mb=0.1) for _ in range(2)]
        handles = [zcomm.compress(m, c) for m, c in zip(models, ("lm4", "none"))]
    for step in range(4):
        losses = [m(batch(rank, step)).square().mean() for m in models]
        (losses[rank % 2] + losses[1 - rank % 2]).backward()
    for i, model in enumerate(models):
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert all(torch.equal(grads, theirs) for theirs in everyones(grads))
        assert handles[i].stats().shared_bytes > 0
        handles[i].close()


def test_two_models_of_a_process_train_side_by_side(three_ranks: World) -> None:
    three_ranks.run(train_two_models)


# The life of groups and processes.


def fork(rank: int, world_size: int) -> list[int]:
    """Rank 1 forks twice. The children drop what they inherited; one lives on for a while."""
    group = group_over("ring", range(3), LM4_SLOT, 20.0)
    expected = reduced(rank, group)
    children = []
    if rank == 1:
        for seconds in (0.0, 1.0):
            child = os.fork()
            if child == 0:
                is_clean = not mapped_segments() and not ring_of(group)._memory.segment.address
                time.sleep(seconds)
                os._exit(0 if is_clean else 1)
            children.append(child)
    for _ in range(5):
        assert torch.equal(reduced(rank, group), expected)
        time.sleep(0.05)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert torch.equal(reduced(rank, group), expected)
    return codes


def reduced(rank: int, group: Any, codec: str = "lm4") -> torch.Tensor:
    x = data(rank, 100_000)
    zcomm.all_reduce(x, codec, group)
    return x


def test_a_forked_child_does_not_disturb_its_parent(three_ranks: World) -> None:
    assert three_ranks.run(fork)[1] == [0, 0]


def begin_anew(rank: int, world_size: int, folder: Path) -> list[int]:
    """Ends the process group and makes another one, again and again."""
    left = []
    for life in range(5):
        x = torch.full((5000,), float(rank))
        zcomm.all_reduce(x, "none")
        assert (x == 0.5).all()
        assert isinstance(engine_of(None).transport.ring, Ring)
        dist.destroy_process_group()
        store = dist.FileStore(str(folder / f"store-{life}"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        left.append(open_fds())
    return left


def test_a_new_process_group_has_a_new_ring(tmp_path: Path) -> None:
    for fds in run_ranks(2, begin_anew, tmp_path):
        assert fds[-1] <= fds[0] + 1, fds  # a group of gloo may still be ending


def close_early(rank: int, world_size: int, codec: str) -> None:
    """Rank 0 ends its engine while rank 2 has yet to read what it wrote."""
    group = group_over("ring", range(3), LM4_SLOT, 20.0)
    if rank == 2:
        at("after reduce", 1, lambda: time.sleep(0.5))
    x = in_chunks(data(rank, 60_000))
    started = time.monotonic()
    zcomm.all_reduce(x, codec, group)
    if rank == 0:
        engine_of(group).stop()
    assert rank != 2 or time.monotonic() - started > 0.5
    assert all(torch.equal(x, theirs) for theirs in everyones(x))


def test_an_engine_may_end_while_its_peers_still_read(three_ranks: World) -> None:
    three_ranks.run(close_early, "lm4")


def turn_off_on_one(rank: int, world_size: int, way: str) -> str:
    group = dist.new_group(range(3))
    x = torch.full((5000,), 3.0 * rank)
    with (
        over("gloo" if (rank, way) == (1, "variable") else "ring"),
        pytest.MonkeyPatch.context() as m,
    ):
        if (rank, way) == (1, "kernels"):
            reference = kernels.select(x.device, "reference")
            m.setattr(kernels, "_select", lambda device, name: reference)
        zcomm.all_reduce(x, "none", group)
    assert (x == 3.0).all()
    found = engine_of(group).transport.ring
    assert isinstance(found, NoSharedMemory)
    return found.reason


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("variable", "rank 1: ZCOMM_SHM=0 turns shared memory off"),
        ("kernels", "rank 1: expected kernels 'cpu', got 'reference'"),
    ],
)
def test_one_rank_without_shared_memory_means_gloo_for_all(
    three_ranks: World, way: str, reason: str
) -> None:
    assert set(three_ranks.run(turn_off_on_one, way)) == {reason}


def be_too_many(rank: int, world_size: int) -> str:
    group = dist.new_group(range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "_MOST_RANKS", 2)
        assert torch.equal(reduced(rank, group), reduced(rank, group_over("gloo", range(3))))
    found = engine_of(group).transport.ring
    assert isinstance(found, NoSharedMemory)
    return found.reason


def test_more_ranks_than_there_is_room_for_use_gloo(three_ranks: World) -> None:
    why = "expected 2 ranks on a host at most, got 3"
    each = "; ".join(f"rank {r}: {why}" for r in range(3))
    assert set(three_ranks.run(be_too_many)) == {each}
