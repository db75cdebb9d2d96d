"""Calls of ZeroOptimizer.step(): order, schedulers, and ranks that die or never call it."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest
from torch.distributed.algorithms.join import Join
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as schedulers

from ddp_training import Net
from raised import Raised, raised
from ranks import World
from zero_training import (
    backward,
    difference,
    parameters,
    plain,
    plain_and_zero,
    train,
    wrapped,
    zero,
)

pytest_plugins = ["ddp_ranks", "zero_ranks"]

FEW = {"bucket_cap_mb": 0.02}  # several buckets
TIMEOUT_S = 8.0


def calls_out_of_order(rank: int, world_size: int, views: bool) -> dict[str, Any]:
    ddp = wrapped(Net, gradient_as_bucket_view=views)
    opt = zero(AdamW, lr=1e-2, weight_decay=0.1)(ddp)
    before = parameters(ddp)
    opt.step()
    found: dict[str, Any] = {"nothing": difference(before, parameters(ddp))}
    with ddp.no_sync():
        backward(ddp, rank, 0)
    found["first"] = raised(opt.step)
    found["clip"] = raised(opt.clip_grad_norm_, 1.0)
    backward(ddp, rank, 1)
    opt.step()
    with ddp.no_sync():
        backward(ddp, rank, 2)
    found["later"] = raised(opt.step)
    return found


@pytest.mark.parametrize("views", [False, True])
def test_step_wants_gradients_that_were_reduced(pair: World, views: bool) -> None:
    for found in pair.run(calls_out_of_order, views):
        assert found.pop("nothing") == 0.0
        for name, error in found.items():
            assert error.type == "RuntimeError", name
            assert "no_sync()" in error.text, name


def two_steps_each(rank: int, world_size: int) -> float:
    found = []
    for make in (plain, zero):
        ddp = wrapped(Net)
        opt = make(AdamW, lr=1e-2)(ddp)
        for step in range(3):
            opt.zero_grad()
            backward(ddp, rank, step)
            opt.step()
            opt.step()
        found.append(parameters(ddp))
    return difference(*found)


def test_a_second_step_uses_the_same_gradient_again(pair: World) -> None:
    assert pair.run(two_steps_each) == [0.0, 0.0]


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": partial(schedulers.LambdaLR, lr_lambda=lambda step: 0.8**step),
    "OneCycleLR": partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=10),
    "CosineAnnealingLR": partial(schedulers.CosineAnnealingLR, T_max=4),
    "SequentialLR": lambda opt: schedulers.SequentialLR(
        opt,
        [schedulers.LinearLR(opt, total_iters=3), schedulers.ExponentialLR(opt, gamma=0.9)],
        milestones=[3],
    ),
}


def differences_of_schedulers(rank: int, world_size: int) -> dict[str, float]:
    return {
        f"{name}, {optimizer.__name__}": plain_and_zero(
            rank, optimizer, options, scheduler=scheduler, steps=9
        )
        for name, scheduler in SCHEDULERS.items()
        for optimizer, options in ((AdamW, {"lr": 1e-2}), (SGD, {"lr": 0.1, "momentum": 0.9}))
    }


def test_schedulers_work_as_with_any_optimizer(pair: World) -> None:
    for found in pair.run(differences_of_schedulers):
        assert all(value == 0.0 for value in found.values()), found


def inside_join(rank: int, world_size: int, batches: int) -> Raised:
    ddp = wrapped(Net, **FEW)
    opt = zero(AdamW, timeout_s=20.0)(ddp)
    return raised(_train_with_join, ddp, opt, rank, batches)


def _train_with_join(ddp: Any, opt: Any, rank: int, batches: int) -> None:
    with Join([ddp]):
        for step in range(batches if rank else 2):
            opt.zero_grad()
            backward(ddp, rank, step)
            opt.step()


@pytest.mark.parametrize("batches", [0, 1, 2])
def test_join_is_refused_on_every_rank(pair: World, batches: int) -> None:
    for error in pair.run(inside_join, batches):
        assert error.is_value_error, error.text
        assert "expected training without Join" in error.text
        assert error.seconds < 15


# Ranks that die, and ranks that never call step().


def step_alone(rank: int, world_size: int, other: str) -> Raised | None:
    ddp = wrapped(Net, **FEW)
    opt = zero(AdamW, timeout_s=TIMEOUT_S)(ddp)
    train(ddp, opt, rank, steps=2)
    backward(ddp, rank, 2)
    calls = {"idle": lambda: None, "backward": partial(backward, ddp, rank, 3)}
    return raised(opt.step if rank == 0 else calls[other])


@pytest.mark.parametrize("other", ["idle", "backward"])
def test_a_rank_that_does_not_step_is_an_error_in_time(pair: World, other: str) -> None:
    alone, error = pair.run(step_alone, other)
    for found in [alone] if other == "idle" else [alone, error]:
        assert found.type != "NoneType", other
        assert found.seconds < TIMEOUT_S + 2
    assert "rank 0: " in alone.text


def killed_in_step(rank: int, world_size: int) -> list[Raised]:
    ddp = wrapped(Net, **FEW)
    opt = zero(AdamW, "lm4", param_codec="lm4", timeout_s=TIMEOUT_S)(ddp)
    train(ddp, opt, rank, steps=3)
    if rank == 1:
        opt.inner.step = lambda: os.kill(os.getpid(), signal.SIGKILL)
    backward(ddp, rank, 3)
    return [raised(opt.step), raised(opt.step), raised(backward, ddp, rank, 4)]


def test_a_rank_that_dies_in_step_is_named_in_time(quartet: World) -> None:
    found = quartet.run(killed_in_step, expect_dead=[1])
    for rank in (0, 2, 3):
        first, *later = found[rank]
        assert first.type == "CommunicationError"
        assert first.seconds < TIMEOUT_S + 2
        assert f"rank {rank}: rank 1 died in parameters of step 4" in first.text
        for error in later:
            assert error.text == first.text
            assert error.seconds < 3
