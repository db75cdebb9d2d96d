"""Gradients under ZeroOptimizer: p.grad, clipping and GradScaler."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from ddp_training import Branches, Net, Spoiled, assert_bit_equal
from raised import Raised, raised
from ranks import World
from zero_training import (
    ROUNDING,
    Assorted,
    backward,
    channels_last,
    clip,
    difference,
    parameters,
    plain,
    train,
    wrapped,
    zero,
)

pytest_plugins = ["ddp_ranks"]

FEW = {"bucket_cap_mb": 0.02}  # several buckets


def readings(rank: int, world_size: int, views: bool) -> tuple[str, dict[str, Raised]]:
    ddp = wrapped(Net, gradient_as_bucket_view=views)
    opt = zero(AdamW, "lm4")(ddp)
    backward(ddp, rank, 0)
    p = ddp.module.middle.weight
    reads = {
        "add": lambda: p.grad + 1,
        "norm": lambda: p.grad.norm(),
        "item": lambda: p.grad[0, 0].item(),
        "clone": lambda: p.grad.clone(),
        "copy": lambda: torch.zeros_like(p).add_(p.grad),
        "mul_": lambda: p.grad.mul_(0.5),
        "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(ddp.parameters(), 1.0),
        "clip_grad_value_": lambda: nn.utils.clip_grad_value_(ddp.parameters(), 1.0),
        "plain step": lambda: SGD([p], lr=0.1).step(),
    }
    found = {name: raised(read) for name, read in reads.items()}
    opt.step()  # nothing of that has harmed it
    return repr(p.grad), found


@pytest.mark.parametrize("views", [False, True])
def test_reading_a_sharded_gradient_names_the_remedy(pair: World, views: bool) -> None:
    for text, found in pair.run(readings, views):
        assert text == "<zcomm: gradient of 'middle.weight', sharded; see opt.full_grad(p)>"
        for name, error in found.items():
            assert error.type == "RuntimeError", (name, error.text)
            assert "opt.clip_grad_norm_(max_norm)" in error.text, name
            assert "opt.full_grad(p)" in error.text, name


def only_middle() -> nn.Module:
    net = Branches()
    net.branch = "middle"
    return net


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "Net": (Net, (8, 32)),
    "unused": (only_middle, (8, 32)),
    "channels last": (channels_last, (4, 8, 7, 7)),
    "odd": (Assorted, (8, 32)),
}


def full_gradients(rank: int, world_size: int, name: str) -> list[Any]:
    """Gradients of plain DDP and of ZeroOptimizer, after a step and a second backward()."""
    model, shape = MODELS[name]
    found = []
    for make in (plain(SGD, lr=0.1), zero(SGD, lr=0.1)):
        ddp = wrapped(model, find_unused_parameters=name == "unused", **FEW)
        opt = make(ddp)
        train(ddp, opt, rank, steps=1, shape=shape)
        opt.zero_grad()
        backward(ddp, rank, 1, shape)
        full = getattr(opt, "full_grad", lambda p: p.grad)
        named = {n: full(p) for n, p in ddp.module.named_parameters() if p.requires_grad}
        found.append((named, {n: g.stride() for n, g in named.items() if g is not None}))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_full_grad_is_the_gradient_of_plain_ddp(pair: World, name: str) -> None:
    for (expected, strides), (got, same_strides) in pair.run(full_gradients, name):
        assert [n for n, g in got.items() if g is None] == [
            n for n, g in expected.items() if g is None
        ]
        assert (None in got.values()) == (name == "unused")
        there = {n: g for n, g in expected.items() if g is not None}
        assert_bit_equal({n: got[n] for n in there}, there)
        assert same_strides == strides


def full_gradients_of_others(rank: int, world_size: int) -> list[Raised]:
    ddp = wrapped(Net)
    opt = zero(SGD)(ddp, [ddp.module.middle.weight])
    backward(ddp, rank, 0)
    return [raised(opt.full_grad, t) for t in (torch.zeros(3), ddp.module.last.weight)]


def test_full_grad_refuses_other_tensors(pair: World) -> None:
    for found in pair.run(full_gradients_of_others):
        for error in found:
            assert error.is_value_error, (error.type, error.text)
            assert "full_grad" in error.text


# Clipping.


# torch's own sums of absolute values, in fp32, are 3e-6 off.
NORM_ROUNDING = {2.0: 1e-6, math.inf: 0.0}


def norms(rank: int, world_size: int) -> dict[Any, Any]:
    """Plain DDP's norm and ours, and the largest difference between clipped gradients."""
    found = {}
    for model, norm_type in ((Net, 2.0), (Net, 1.0), (Net, math.inf), (Assorted, 2.0), (Net, 3)):
        for max_norm in (0.01, 1e6):
            results = []
            for make in (plain(SGD, lr=1.0), zero(SGD, lr=1.0)):
                ddp = wrapped(model)
                opt = make(ddp)
                backward(ddp, rank, 0)
                norm = float(clip(ddp, opt, max_norm, norm_type))
                opt.step()
                results.append((norm, parameters(ddp)))
            (expected, some), (norm, others) = results
            found[model.__name__, norm_type, max_norm] = (expected, norm, difference(some, others))
    return found


def test_clip_grad_norm_returns_the_norm_of_the_whole_gradient(pair: World) -> None:
    first, second = pair.run(norms)
    assert first == second
    for case, (expected, norm, gap) in first.items():
        assert norm == pytest.approx(expected, rel=NORM_ROUNDING.get(case[1], 1e-5)), case
        assert gap <= (ROUNDING if case[-1] == 0.01 else 0.0), case


def nonfinite_norms(rank: int, world_size: int) -> Any:
    ddp = wrapped(Net)
    opt = zero(SGD, lr=1.0)(ddp)
    Spoiled(ddp.module.first.weight, 0).value = math.inf if rank == 1 else None
    backward(ddp, rank, 0)
    error = raised(opt.clip_grad_norm_, 1.0, error_if_nonfinite=True)
    untouched = opt.full_grad(ddp.module.last.weight)
    return error, float(untouched.abs().max()), float(opt.clip_grad_norm_(1.0))


def test_a_norm_that_is_not_finite_is_known_to_every_rank(pair: World) -> None:
    for error, size, norm in pair.run(nonfinite_norms):
        assert error.type == "RuntimeError"
        assert "expected a finite norm" in error.text
        assert 0 < size < math.inf
        assert norm == math.inf


# GradScaler.


def train_scaled(
    rank: int, make: Any, spoiled: tuple[str, int] | None = None, max_norm: float | None = None
) -> Any:
    """Eight steps; step 4 overflows on rank 1."""
    ddp = wrapped(Net, **FEW)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    opt = make(ddp, scaler)
    name, element = spoiled or ("first.weight", 0)
    spoiler = Spoiled(ddp.module.get_parameter(name), element)
    scales, seen = [], []
    for step in range(8):
        spoiler.value = math.inf if spoiled and (rank, step) == (1, 4) else None
        opt.zero_grad()
        loss = ddp(torch.randn(8, 32, generator=torch.Generator().manual_seed(9 * step + rank)))
        seen.append((parameters(ddp), residuals(opt)))
        scaler.scale(loss.square().mean()).backward()
        if max_norm:
            scaler.unscale_(opt)
            clip(ddp, opt, max_norm)
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
    return parameters(ddp), scales, seen


def residuals(opt: Any) -> Any:
    return opt.handle.state_dict()["residuals"] if hasattr(opt, "handle") else None


# Rank 0 owns the first elements of a parameter, rank 1 the last ones.
OVERFLOWS = [("middle.weight", 0), ("middle.weight", 280 * 260 - 1), ("last.bias", 0)]


def plain_sgd(ddp: Any, scaler: Any) -> Any:
    return plain(SGD, lr=0.1)(ddp)


def zero_sgd(ddp: Any, scaler: Any) -> Any:
    return zero(SGD, lr=0.1)(ddp)


def zero_sgd_with_scaler(ddp: Any, scaler: Any) -> Any:
    return zero(SGD, lr=0.1, scaler=scaler)(ddp)


def scaled_like_plain(rank: int, world_size: int) -> list[Any]:
    found = []
    for spoiled in (None, *OVERFLOWS):
        for max_norm in (None, 0.02):
            expected, scales, _ = train_scaled(rank, plain_sgd, spoiled, max_norm)
            for make in (zero_sgd, zero_sgd_with_scaler):
                got, same_scales, seen = train_scaled(rank, make, spoiled, max_norm)
                assert same_scales == scales, (spoiled, same_scales)
                skipped = difference(seen[4][0], seen[5][0]) == 0
                assert skipped == (spoiled is not None)
                found.append((bool(max_norm), difference(got, expected)))
    return found


def test_gradscaler_works_as_with_plain_ddp(pair: World) -> None:
    """Also when only one rank's gradient overflows, and only one owner can see it."""
    for found in pair.run(scaled_like_plain):
        assert len(found) == 16
        assert all(gap <= (ROUNDING if clipped else 0.0) for clipped, gap in found), found


def scaled_with_feedback(rank: int, world_size: int) -> list[Any]:
    def make(ddp: Any, scaler: Any) -> Any:
        return zero(SGD, "lm4", lr=0.1, scaler=scaler, feedback=True)(ddp)

    return [train_scaled(rank, make, spoiled)[1:] for spoiled in OVERFLOWS]


def test_a_skipped_step_leaves_residuals_as_they_were(pair: World) -> None:
    first, second = pair.run(scaled_with_feedback)
    for (scales, seen), (same_scales, _) in zip(first, second):
        assert scales == same_scales
        assert scales[4] == scales[3] / 2
        (weights, before), (same_weights, after) = seen[4:6]
        assert_bit_equal(same_weights, weights)
        # Residuals are kept in units of the scale of their step, which grew in the third step.
        factor = scales[3] / scales[2]
        assert any(r.any() for r in before["sent"].values())
        for name, residual in before["sent"].items():
            assert torch.equal(after["sent"][name], residual * factor), name
        later = seen[6][1]["sent"]
        assert any(not torch.equal(later[n], after["sent"][n]) for n in later)
