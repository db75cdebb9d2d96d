"""DDP's modes: with codec "none", each matches plain DDP bit for bit; feedback loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import (
    ROUNDING,
    Branches,
    Checkpointed,
    Net,
    OddShapes,
    Outcome,
    assert_bit_equal,
    assert_equal_replicas,
    seeded,
    train,
)
from ranks import World

pytest_plugins = ["ddp_ranks"]


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 70), nn.Linear(32, 70)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.second(2 * x)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(8, 40, 3), nn.BatchNorm2d(40), nn.ReLU(), nn.Conv2d(40, 16, 3), nn.Flatten()
    )


def channels_last() -> nn.Module:
    return convolutions().to(memory_format=torch.channels_last)


def frozen() -> nn.Module:
    net = Net()
    net.first.requires_grad_(False)
    net.last.bias.requires_grad_(False)
    return net


def one_branch() -> nn.Module:
    net = Branches()
    net.branch = "middle"
    return net


class Scenario(NamedTuple):
    model: Callable[[], nn.Module]
    ddp: dict[str, Any]
    training: dict[str, Any] = {}  # noqa: RUF012
    settings: dict[str, Any] = {}  # noqa: RUF012

    def train(self, rank: int, codec: str | None) -> tuple[Outcome, DistributedDataParallel, int]:
        """The outcome, the model and the steps. Without a codec, trains with plain DDP."""
        ddp = DistributedDataParallel(seeded(self.model), **self.ddp)
        if codec is None:
            return train(ddp, rank, **self.training), ddp, 0
        handle = zcomm.compress(ddp, codec, feedback=True, chunk_mb=1 / 16, **self.settings)
        return train(ddp, rank, handle, **self.training), ddp, handle.stats().steps


FEW = {"bucket_cap_mb": 0.02}  # several buckets
VIEWS = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
IMAGES = {"shape": (4, 8, 7, 7)}
SCENARIOS = {
    "default": Scenario(Net, {}),
    "several buckets": Scenario(Net, FEW),
    "static graph": Scenario(Net, STATIC | FEW),
    "static graph, unused": Scenario(one_branch, STATIC),
    "unused": Scenario(one_branch, UNUSED),
    "nothing unused": Scenario(Net, UNUSED | FEW),
    "bucket views": Scenario(Net, VIEWS | FEW),
    "bucket views, zeroed": Scenario(Net, VIEWS | FEW, {"set_to_none": False}),
    "bucket views, unused": Scenario(one_branch, VIEWS | UNUSED),
    "zeroed": Scenario(Net, {}, {"set_to_none": False}),
    "no_sync": Scenario(Net, FEW, {"accumulate": 3}),
    "no_sync, bucket views": Scenario(Net, VIEWS, {"accumulate": 2}),
    "batch norm": Scenario(convolutions, {}, IMAGES),
    "channels last": Scenario(channels_last, {}, IMAGES),
    "channels last, bucket views": Scenario(channels_last, VIEWS, IMAGES),
    "frozen": Scenario(frozen, {}),
    "tied": Scenario(Tied, {}),
    "odd shapes": Scenario(OddShapes, {"bucket_cap_mb": 0.0001}, settings={"min_numel": 1}),
    "checkpoint": Scenario(partial(Checkpointed, False), FEW),
    "reentrant checkpoint": Scenario(partial(Checkpointed, True), FEW),
}


def plain_and_uncompressed(rank: int, world_size: int, name: str) -> list[Any]:
    results = []
    for codec in (None, "none"):
        trained, ddp, _ = SCENARIOS[name].train(rank, codec)
        results.append((trained, dict(ddp.module.named_buffers())))
    return results


def compressed(rank: int, world_size: int, name: str) -> tuple[Outcome, int]:
    trained, _, steps = SCENARIOS[name].train(rank, "lm4")
    return trained, steps


@pytest.mark.parametrize("name", SCENARIOS)
def test_without_a_codec_it_is_plain_ddp_bit_for_bit(pair: World, name: str) -> None:
    for (plain, buffers), (uncompressed, same_buffers) in pair.run(plain_and_uncompressed, name):
        assert_bit_equal(uncompressed.parameters, plain.parameters)
        assert_bit_equal(uncompressed.gradients, plain.gradients)
        assert_bit_equal(same_buffers, buffers)


@pytest.mark.parametrize("name", SCENARIOS)
def test_compressed_training_loses_nothing_and_replicas_stay_equal(pair: World, name: str) -> None:
    results = pair.run(compressed, name)
    assert_equal_replicas([trained for trained, _ in results])
    for trained, steps in results:
        assert 0 < trained.gap < ROUNDING
        assert steps == 4


def buckets_of_each_step(rank: int, world_size: int, static_graph: bool) -> Any:
    ddp = DistributedDataParallel(seeded(Net), bucket_cap_mb=0.02, static_graph=static_graph)
    names = {id(p): name for name, p in ddp.module.named_parameters()}
    state, seen = zcomm.HookState("lm4", feedback=True), []

    def spy(state, bucket):  # type: ignore[no-untyped-def]
        if bucket.index() == 0:
            seen.append([])
        seen[-1].append([names[id(p)] for p in bucket.parameters()])
        return zcomm.hook(state, bucket)

    ddp.register_comm_hook(state, spy)
    return train(ddp, rank, state), seen


@pytest.mark.parametrize("static_graph", [False, True])
def test_residuals_survive_the_rebuild_of_buckets(pair: World, static_graph: bool) -> None:
    results = pair.run(buckets_of_each_step, static_graph)
    assert_equal_replicas([trained for trained, _ in results])
    for trained, seen in results:
        assert seen[0] != seen[-1]
        assert len(seen[-1]) > 1
        assert trained.gap < ROUNDING
