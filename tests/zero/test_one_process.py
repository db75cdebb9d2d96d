"""A world of one process with an unwrapped model, as Ray and Accelerate leave it there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW

import zcomm
from ddp_training import Net, assert_bit_equal, batch, seeded
from ranks import World
from zero_training import Assorted, channels_last, parameters, trainable

pytest_plugins = ["ddp_ranks"]

Loop = Callable[[nn.Module, Any, Any], None]
IMAGES = (4, 8, 7, 7)
BOTH_WAYS = {"codec": "lm4", "param_codec": "lm4", "feedback": True}


def loss_of(model: Any, step: int, shape: tuple[int, ...] = (8, 32)) -> Tensor:
    x = batch(0, step, *shape).to(next(model.parameters()).dtype)
    loss: Tensor = model(x).float().square().mean()
    return loss


def steps(model: nn.Module, opt: Any, clip: Any) -> None:
    for step in range(4):
        opt.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, step).backward()
        loss_of(model, step + 7).backward()
        clip(0.5)
        opt.step()


def scaled(model: nn.Module, opt: Any, clip: Any) -> None:
    """The second step overflows, and is skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(4):
        opt.zero_grad()
        scaler.scale(loss_of(model, step) * (torch.inf if step == 1 else 1.0)).backward()
        scaler.unscale_(opt)
        clip(1.0)
        scaler.step(opt)
        scaler.update()


def images(model: nn.Module, opt: Any, clip: Any) -> None:
    for step in range(3):
        opt.zero_grad()
        loss_of(model, step, IMAGES).backward()
        for p in model.parameters():
            p.grad = p.grad.contiguous()  # not in the parameter's own order
        opt.step()


LOOPS: dict[str, tuple[Any, type[torch.optim.Optimizer], dict[str, Any], Loop]] = {
    "AdamW": (Net, AdamW, {"lr": 1e-2}, steps),
    "momentum": (Assorted, SGD, {"lr": 0.1, "momentum": 0.9}, steps),
    "a scaler": (Net, AdamW, {"lr": 1e-2}, scaled),
    "another memory format": (channels_last, Adam, {"lr": 1e-2}, images),
}


@pytest.mark.parametrize("name", LOOPS)
def test_an_unwrapped_model_trains_as_with_the_plain_optimizer(name: str) -> None:
    make, kind, options, loop = LOOPS[name]
    model, other = seeded(make), seeded(make)
    opt = zcomm.ZeroOptimizer(model, kind, codec="lm4", **options)
    plain = kind(trainable(other), **options)
    loop(model, opt, opt.clip_grad_norm_)
    loop(other, plain, lambda most: nn.utils.clip_grad_norm_(other.parameters(), most))
    for got, expected in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
    state, first = opt.consolidated_state_dict(), trainable(model)[0]
    assert torch.equal(opt.full_grad(first), first.grad)
    assert state is not None
    assert state["state"].keys() == plain.state_dict()["state"].keys()
    plain.load_state_dict(state)
    opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert_bit_equal(opt.consolidated_state_dict()["state"], state["state"])


def test_without_clipping_not_a_bit_differs() -> None:
    model, other = seeded(Net).bfloat16(), seeded(Net).bfloat16()
    opt = zcomm.ZeroOptimizer(model, SGD, lr=0.5)
    masters = {name: p.detach().float() for name, p in other.named_parameters()}
    for step in range(3):
        for one in (model, other):
            one.zero_grad()
            loss_of(one, step).backward()
        opt.step()
        with torch.no_grad():
            for name, p in other.named_parameters():
                p.copy_(masters[name].sub_(p.grad.float(), alpha=0.5))
    assert_bit_equal(parameters(model), parameters(other))


def test_an_unwrapped_model_has_a_handle() -> None:
    model = seeded(Net)
    handle, samples = zcomm.compress(torch.compile(model, backend="eager"), "lm4"), []
    with zcomm.monitor.Callback(handle, samples.append, every=1):
        for step in range(3):
            loss_of(model, step).backward()
    assert (handle.stats().steps, handle.stats().wire_bytes, handle.stats().ratio) == (3, 0, 1.0)
    assert [sample.step for sample in samples] == [1, 2, 3]
    assert handle.transport == "none: one rank sends nothing"
    handle.load_state_dict(handle.state_dict())
    handle.close()


def test_one_of_several_processes_still_needs_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TypeError, match="wrap the model first"):
        zcomm.compress(seeded(Net))


# An elastic job that begins with one worker, goes on with two, and ends with one.


def elastic(rank: int, world_size: int, folder: Path, first: int) -> tuple[int, Any, Any, Any]:
    """Loads what the last world saved, takes two steps and saves; what it found and left."""
    model = seeded(Net)
    wrapped = DistributedDataParallel(model) if world_size > 1 else model
    opt = zcomm.ZeroOptimizer(wrapped, AdamW, lr=1e-2, **BOTH_WAYS)
    state = {"model": model, "optimizer": opt}
    loaded = zcomm.load_checkpoint(folder, state) or 0
    found = opt.consolidated_state_dict(), parameters(model)
    for step in range(first, first + 2):
        opt.zero_grad()
        wrapped(batch(rank, step)).square().mean().backward()
        opt.step()
    zcomm.save_checkpoint(folder, state, first + 2)
    left = opt.consolidated_state_dict(), parameters(model)
    return loaded, found, left, opt.compressor.step


def test_a_job_may_begin_and_end_with_one_worker(pair: World, tmp_path: Path) -> None:
    with World(1) as one:
        worlds = [one, pair, one]
        runs = [world.run(elastic, tmp_path, 2 * i)[0] for i, world in enumerate(worlds)]
    assert [loaded for loaded, *_ in runs] == [0, 2, 4]
    assert [steps for *_, steps in runs] == [2, 4, 6]
    for (_, _, (state, weights), _), (_, (found, found_weights), _, _) in zip(runs, runs[1:]):
        assert_bit_equal(found["state"], state["state"])
        assert_bit_equal(found_weights, weights)
