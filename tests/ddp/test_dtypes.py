"""Dtypes under DDP, autocast with a GradScaler, and gradients that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import (
    LM4,
    ROUNDING,
    Books,
    Checkpointed,
    Mixed,
    Net,
    Outcome,
    Spoiled,
    assert_bit_equal,
    assert_equal_replicas,
    batch,
    outcome,
    seeded,
)
from ranks import World

pytest_plugins = ["ddp_ranks"]

BLOCK = zcomm.codec("lm4").block


def train_in(rank: int, world_size: int, dtype: torch.dtype) -> Outcome:
    ddp = DistributedDataParallel(seeded(Net).to(dtype), bucket_cap_mb=0.02)
    handle = zcomm.compress(ddp, **LM4)
    books = Books(ddp, handle)
    for step in range(4):
        ddp.zero_grad()
        ddp(batch(rank, step).to(dtype)).float().square().mean().backward()
        books.close_step()
    return outcome(ddp, books)


@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_half_precision_gradients_are_right_to_their_last_digit(
    pair: World, dtype: torch.dtype, digits: int
) -> None:
    outcomes = pair.run(train_in, dtype)
    assert_equal_replicas(outcomes)
    for trained in outcomes:
        assert all(g is not None and g.dtype is dtype for g in trained.gradients.values())
        assert trained.gap < 2.0**-digits


def train_mixed(rank: int, world_size: int) -> tuple[Outcome, dict[str, Any]]:
    """The outcome, and the exact mean of the last step's fp64 gradients."""
    net = seeded(Mixed)
    ddp = DistributedDataParallel(net)
    handle = zcomm.compress(ddp, **LM4)
    books, means = Books(ddp, handle), {}
    for name, p in net.exact.named_parameters():
        p.register_hook(lambda g, name=f"exact.{name}": means.update({name: g / 2}))
    for step in range(4):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        books.close_step()
    for mean in means.values():
        dist.all_reduce(mean)
    return outcome(ddp, books), means


def test_a_model_of_several_dtypes_keeps_fp64_exact(pair: World) -> None:
    results = pair.run(train_mixed)
    assert_equal_replicas([trained for trained, _ in results])
    for trained, means in results:
        assert trained.gap < 2.0**-8
        assert len(means) == 2
        for name, mean in means.items():
            got = trained.gradients[name]
            assert got is not None
            assert got.dtype is torch.float64
            assert torch.equal(got, mean)


def train_scaled(
    rank: int,
    world_size: int,
    spoiled: str,
    at_step: int,
    dtype: torch.dtype = torch.bfloat16,
    model: Callable[[], nn.Module] = Net,
    **settings: Any,
) -> Any:
    """Seven steps, one of which overflows on rank 1, and the state before and after that one."""
    net = seeded(model)
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    handle = zcomm.compress(ddp, "lm4", scaler=scaler, chunk_mb=1 / 16, **settings)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    books, spoiler = Books(ddp, handle), Spoiled(net.get_parameter(spoiled), 0)
    seen, scales = [], []
    for step in range(7):
        seen += [(handle.state_dict(), outcome(ddp).parameters)] if step == at_step else []
        spoiler.value = float("inf") if (rank, step) == (1, at_step) else None
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = ddp(batch(rank, step)).float().square().mean()
        scaler.scale(loss).backward()
        scales.append(scaler.get_scale())
        books.close_step(scales[-1], counts=step != at_step)
        scaler.step(optimizer)
        scaler.update()
        seen += [(handle.state_dict(), outcome(ddp).parameters)] if step == at_step else []
    exact = settings == {"feedback": True}
    return outcome(ddp, books if exact else None), seen, scales


def expect_skipped(results: list[Any], at_step: int) -> None:
    assert_equal_replicas([trained for trained, *_ in results])
    for trained, ((before, weights), (after, weights_after)), scales in results:
        assert scales[at_step + 1] == scales[at_step] / 2
        assert_bit_equal(weights_after, weights)
        assert not torch.equal(trained.parameters["middle.weight"], weights["middle.weight"])
        factor = scales[at_step] / scales[at_step - 1] if at_step else 1.0
        assert after["scale"] == scales[at_step]
        for hop in ("sent", "owned"):
            for name, residual in before["residuals"][hop].items():
                assert residual.any() == (at_step > 0)
                assert torch.equal(after["residuals"][hop][name], residual * factor)


# "middle.bias" is sent uncompressed: every residual of that step was written for nothing.
@pytest.mark.parametrize("spoiled", ["middle.weight", "middle.bias", "first.weight"])
@pytest.mark.parametrize("at_step", [0, 3, 4])
def test_an_overflow_on_one_rank_leaves_all_residuals_as_they_were(
    pair: World, spoiled: str, at_step: int
) -> None:
    """The scale grew just before step 4, but not before step 3."""
    results = pair.run(scaled_with_feedback, spoiled, at_step)
    expect_skipped(results, at_step)
    assert all(trained.gap < ROUNDING for trained, *_ in results)


def scaled_with_feedback(rank: int, world_size: int, spoiled: str, at_step: int) -> Any:
    return train_scaled(rank, world_size, spoiled, at_step, feedback=True)


def scaled_in_fp16(rank: int, world_size: int) -> Any:
    return train_scaled(rank, world_size, "first.bias", 3, torch.float16, feedback=True)


def test_an_overflow_under_fp16_autocast(pair: World) -> None:
    results = pair.run(scaled_in_fp16)
    expect_skipped(results, 3)
    assert all(trained.gap < ROUNDING for trained, *_ in results)


def scaled_and_checkpointed(rank: int, world_size: int) -> Any:
    reentrant = partial(Checkpointed, True)
    return train_scaled(rank, world_size, "first.weight", 4, model=reentrant, feedback=True)


def test_an_overflow_after_a_nested_backward(pair: World) -> None:
    """The first buckets are full when a nested backward ends; the overflow comes later."""
    results = pair.run(scaled_and_checkpointed)
    expect_skipped(results, 4)
    assert all(trained.gap < ROUNDING for trained, *_ in results)


def scaled_with(rank: int, world_size: int, settings: dict[str, Any]) -> Any:
    return train_scaled(rank, world_size, "middle.bias", 3, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"feedback": 0.5},
        {"feedback": 0.5, "residual_dtype": torch.bfloat16},
        {"feedback": True, "residual_dtype": torch.bfloat16},
        {"feedback": True, "residual_dtype": torch.int8},
    ],
    ids=str,
)
def test_an_overflow_with_other_kinds_of_residuals(pair: World, settings: dict[str, Any]) -> None:
    expect_skipped(pair.run(scaled_with, settings), 3)


NANS = {"middle.weight": 40_000, "first.weight": 5, "middle.bias": 7}


def steps_with_nans(rank: int, world_size: int, value: float | None) -> Any:
    """Gradients and residuals of four steps; in step 2, rank 1 has `value` in three parameters."""
    net = seeded(Net)
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.02)
    handle = zcomm.compress(ddp, **LM4)
    spoilers = [Spoiled(net.get_parameter(name), element) for name, element in NANS.items()]
    gradients, residuals = [], []
    for step in range(4):
        for spoiler in spoilers:
            spoiler.value = value if (rank, step) == (1, 2) else None
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        gradients.append({name: g.view(-1) for name, g in outcome(ddp).gradients.items()})
        residuals.append(handle.state_dict()["residuals"])
    return gradients, residuals


def test_a_nan_spoils_its_block_alone_and_for_one_step(pair: World) -> None:
    ranks, clean = pair.run(steps_with_nans, float("nan")), pair.run(steps_with_nans, None)
    for name in ranks[0][0][2]:
        block = slice(0, 0)
        if name in NANS:
            length = BLOCK if name.endswith("weight") else 1
            block = slice(NANS[name] // length * length, NANS[name] // length * length + length)
        for (gradients, _), (expected, _) in zip(ranks, clean):
            mask = torch.zeros_like(gradients[2][name], dtype=torch.bool)
            mask[block] = True
            assert torch.equal(gradients[2][name].isnan(), mask)
            assert torch.equal(gradients[2][name][~mask], expected[2][name][~mask])
            assert torch.equal(gradients[3][name][~mask], expected[3][name][~mask])
            assert gradients[3][name].isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_block_that_is_not_finite_keeps_its_residuals(pair: World, value: float) -> None:
    """On the rank that sends it and on the rank that owns it; all other ranks act as usual."""
    ranks, clean = pair.run(steps_with_nans, value), pair.run(steps_with_nans, None)
    first = len(ranks[0][1][0]["owned"]["middle.weight"])  # the part rank 0 owns
    kept = {
        (1, "sent", "middle.weight"): 40_000 // BLOCK,
        (1, "owned", "middle.weight"): 40_000 // BLOCK - first // BLOCK,
        (1, "sent", "first.weight"): 0,
        (0, "owned", "first.weight"): 0,
    }
    for rank, ((_, residuals), (_, expected)) in enumerate(zip(ranks, clean)):
        for hop, held in residuals[2].items():
            for name, residual in held.items():
                should = expected[2][hop][name].clone()
                if (rank, hop, name) in kept:
                    start = kept[rank, hop, name] * BLOCK
                    should[start : start + BLOCK] = residuals[1][hop][name][start : start + BLOCK]
                    assert not torch.equal(should, expected[2][hop][name])
                assert torch.equal(residual, should), (rank, hop, name)
