"""Jobs that fit into parcels: one exchange instead of three, and the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from ranks import OVER_GLOO, World
from zcomm.engine import small
from zcomm.engine.parcel import SIGNATURE_NBYTES, parcel_nbytes
from zcomm.transport.channels import Channel

CODECS = ("none", "bf16", "fp16", "int8", "fp8", "int4", "lm4", "lm2")
SIZES = (0, 1, 5, 129, 256, 700)


@pytest.fixture(scope="module", params=[2, 3])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param, env=OVER_GLOO) as ranks:
        yield ranks


class _Exchanges:
    """Counts those of this rank, while it is open."""

    def __enter__(self) -> _Exchanges:
        self.count, self._original = 0, Channel.all_to_all

        def counted(channel: Channel, *args: Any) -> Any:
            self.count += 1
            return self._original(channel, *args)

        Channel.all_to_all = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Channel.all_to_all = self._original  # type: ignore[method-assign]


def results(rank: int, world_size: int, group: Any) -> list[Tensor]:
    """Of all collectives, for many codecs, dtypes and sizes."""
    g, found = torch.Generator().manual_seed(rank), []
    for codec in CODECS:
        for numel in SIZES:
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(numel, generator=g).to(dtype)
                if numel > 5:
                    x[3], x[4] = float("nan"), -0.0
                zcomm.all_reduce(x, codec, group)
                whole = torch.randn(numel * world_size, generator=g).to(dtype)
                part = torch.empty(numel, dtype=dtype)
                zcomm.reduce_scatter(part, whole, codec, group, op="sum")
                gathered = torch.empty(numel * world_size, dtype=dtype)
                zcomm.all_gather(gathered, part, codec, group)
                found += [t.view(torch.uint8) for t in (x, part, gathered)]
    return found


def in_both_ways(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    groups = [dist.new_group(list(range(world_size))) for _ in range(2)]
    parcels = results(rank, world_size, groups[0])
    is_small = small.is_small
    small.is_small = lambda *_: False
    try:
        return parcels, results(rank, world_size, groups[1])
    finally:
        small.is_small = is_small


def test_parcels_change_no_bit(world: World) -> None:
    for parcels, hops in world.run(in_both_ways):
        assert len(parcels) == len(hops)
        for one, usual in zip(parcels, hops):
            assert torch.equal(one, usual)


def exchanges(rank: int, world_size: int) -> dict[str, int]:
    small, large = torch.ones(256), torch.ones(100_000)
    feedback = zcomm.Feedback()
    part, whole = torch.ones(100), torch.ones(100 * world_size)
    calls = {
        "all_reduce": lambda: zcomm.all_reduce(small, "none"),
        "lm4": lambda: zcomm.all_reduce(small, "lm4"),
        "reduce_scatter": lambda: zcomm.reduce_scatter(part, whole, "int8"),
        "all_gather": lambda: zcomm.all_gather(whole, part, "int8"),
        "large": lambda: zcomm.all_reduce(large, "none"),
        "feedback": lambda: zcomm.all_reduce(small, "int4", feedback=feedback),
        "feedback, one hop": lambda: zcomm.reduce_scatter(
            part, whole, "int4", feedback=zcomm.Feedback()
        ),
    }
    counted = {}
    for name, call in calls.items():
        call()  # the first one makes the engine
        with _Exchanges() as made:
            call()
        counted[name] = made.count
    return counted


def test_a_small_job_takes_one_exchange(world: World) -> None:
    usual = {"large": 3, "feedback": 3}
    for counted in world.run(exchanges):
        assert counted == {name: usual.get(name, 1) for name in counted}


def beside_a_large_one(rank: int, world_size: int) -> list[Tensor]:
    """The engine's memory grows while the parcels of a small job are under way."""
    found = []
    for large in (200_000, 400_000, 800_000):
        group = dist.new_group(list(range(world_size)))
        tensors = [torch.full((numel,), float(rank)) for numel in (large, 300)]
        for work in [zcomm.all_reduce(t, "int8", group, async_op=True) for t in tensors]:
            assert work is not None
            work.wait()
        found += tensors
    return found


def test_a_small_job_beside_a_large_one(world: World) -> None:
    results = world.run(beside_a_large_one)
    for tensors in zip(*results):
        mean = (len(results) - 1) / 2
        assert all(torch.equal(t, tensors[0]) for t in tensors)
        assert torch.allclose(tensors[0], torch.full_like(tensors[0], mean), rtol=0.01)


def interrupted(rank: int, world_size: int) -> tuple[str, str]:
    """Ctrl-C in a caller that runs its own job; what a later call says."""
    group = dist.new_group(list(range(world_size)))
    zcomm.all_reduce(torch.ones(3), "none", group)
    original = small._Native.take

    def take(self: Any, parcels: Any) -> None:
        raise KeyboardInterrupt

    said = []
    small._Native.take = take
    for error in (KeyboardInterrupt, RuntimeError):
        try:
            zcomm.all_reduce(torch.ones(3), "none", group)
        except error as found:
            said.append(str(found))
        small._Native.take = original
    return said[0], said[1]


def test_an_interrupted_call_ends_the_engine_and_says_so(world: World) -> None:
    for first, later in world.run(interrupted):
        assert first == ""
        assert "all_reduce of 3 elements was interrupted (KeyboardInterrupt)" in later


def test_parcels_of_many_ranks_are_short() -> None:
    assert parcel_nbytes(1) == parcel_nbytes(2) == parcel_nbytes(5) == 4096
    for world_size in (16, 64, 257):
        assert parcel_nbytes(world_size) * (world_size - 1) <= 16384
    assert parcel_nbytes(100_000) == SIGNATURE_NBYTES
