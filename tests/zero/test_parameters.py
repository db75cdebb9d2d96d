"""Parameters under ZeroOptimizer: dtypes, masters, compressed differences, outside changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

import zcomm
from ddp_training import Mixed, Net, seeded
from raised import Raised, raised
from ranks import World
from zero_training import (
    backward,
    difference,
    lag,
    masters,
    parameters,
    plain,
    spread,
    train,
    trainable,
    wrapped,
    zero,
)

pytest_plugins = ["ddp_ranks"]


class Sums(nn.Module):
    """Parameters of three dtypes, all 1; the gradient is the input, whatever their values."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.ones(3000))
        self.brief = nn.Parameter(torch.ones(3000, dtype=torch.bfloat16))
        self.small = nn.Parameter(torch.ones(3000, dtype=torch.float16))
        self.exact = nn.Parameter(torch.ones(3000, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        products = [(p * x.to(p.dtype)).double() for p in self.parameters()]
        return torch.stack(products)


LR = 2.0**-10  # a quarter of what bf16 can resolve at 1, and of what is left at 0.5
STEPS = 160


def small_updates(rank: int, world_size: int, param_codec: str | None) -> Any:
    ddp = wrapped(Sums)
    opt = zero(SGD, param_codec=param_codec, lr=LR)(ddp)
    for _ in range(STEPS):
        opt.zero_grad()
        # 0 on rank 0 and 4, 2, 0, 4, 2, 0 … on rank 1: the mean is 2, 1 or 0.
        ddp(rank * (4 - 2 * (torch.arange(3000) % 3)).float()).sum().backward()
        opt.step()
    opt.sync_parameters()
    return parameters(ddp.module), masters(opt)


@pytest.mark.parametrize("param_codec", [None, "int8"])
def test_small_updates_accumulate_in_masters(pair: World, param_codec: str | None) -> None:
    expected = 1 - LR * STEPS * (2.0 - torch.arange(3000) % 3)
    for found, truth in pair.run(small_updates, param_codec):
        assert [p.dtype for p in found.values()] == [p.dtype for p in Sums().parameters()]
        for name, p in found.items():
            assert torch.equal(p, expected.to(p.dtype)), name
            wide = torch.float64 if name == "exact" else torch.float32
            assert torch.equal(truth[name], expected.to(wide)), name


def mixed_replicas(rank: int, world_size: int) -> Any:
    found = {}
    for codec, param_codec in (("none", None), ("lm4", None), ("lm4", "lm4")):
        ddp = wrapped(Mixed, bucket_cap_mb=0.02)
        opt = zero(AdamW, codec, param_codec=param_codec, lr=1e-3)(ddp)
        start = float(ddp(torch.ones(8, 32)).square().mean())
        train(ddp, opt, rank, steps=30, max_norm=10.0)
        end = float(ddp(torch.ones(8, 32)).square().mean())
        found[codec, param_codec] = (spread(ddp), end < start)
        opt.close()
    return found


def test_models_of_several_dtypes_train_alike_on_all_ranks(pair: World) -> None:
    for found in pair.run(mixed_replicas):
        assert len(found) == 3
        assert set(found.values()) == {(0.0, True)}, found


# Parameters that are gathered as differences.

# What the codec may lose, relative to the largest difference in a block.
LEFT_OUT = {"int8": 1 / 254, "lm4": 0.25, "lm2": 0.6}


def lags(rank: int, world_size: int) -> dict[str, Any]:
    """How far parameters are from their masters, before and after sync_parameters()."""
    found = {}
    for codec in LEFT_OUT:
        ddp = wrapped(Net)
        opt = zero(Adam, param_codec=codec, lr=1e-3, min_numel=0)(ddp)
        train(ddp, opt, rank, steps=20)
        before = lag(ddp, opt)
        truth = masters(opt)
        opt.sync_parameters()
        same = difference(truth, masters(opt)) == 0
        found[codec] = (before, lag(ddp, opt), spread(ddp), same)
        train(ddp, opt, rank, steps=3)
        assert spread(ddp) == 0
        assert lag(ddp, opt) > 0
        opt.close()
    return found


def test_parameters_stay_near_their_masters_until_they_are_synchronised(pair: World) -> None:
    """Adam moves an element by at most 3.2 lr; what was lost is part of the next difference."""
    for found in pair.run(lags):
        for codec, (before, after, apart, same) in found.items():
            left_out = LEFT_OUT[codec]
            assert 0 < before <= 3.2e-3 * left_out / (1 - left_out), codec
            assert (after, apart, same) == (0.0, 0.0, True), codec


def settled(rank: int, world_size: int) -> float:
    """Once nothing moves, the next steps send what was lost."""
    ddp = wrapped(Net)
    opt = zero(SGD, param_codec="int8", lr=0.1, min_numel=0)(ddp)
    train(ddp, opt, rank, steps=3)
    opt.zero_grad()
    for _ in range(12):
        opt.step()
    return lag(ddp, opt)


def test_what_a_codec_left_out_is_not_lost(pair: World) -> None:
    assert all(gap < 1e-9 for gap in pair.run(settled))


# Parameters that are changed outside of step().


def load(ddp: Any) -> None:
    ddp.module.load_state_dict(seeded(Net, seed=1).state_dict())


def copy(ddp: Any) -> None:
    with torch.no_grad():
        ddp.module.middle.weight.copy_(seeded(Net, seed=1).middle.weight)
        ddp.module.last.bias.zero_()


def replace(ddp: Any) -> None:
    for p, new in zip(ddp.parameters(), seeded(Net, seed=1).parameters()):
        p.data = new.detach().clone()


def average(ddp: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(ddp.parameters()), 0.5)


CHANGES = {"load": load, "copy": copy, "replace": replace, "average": average}


def changed_from_outside(rank: int, world_size: int) -> dict[str, Any]:
    """The difference from plain DDP with the same changes, without and with codecs."""
    found: dict[str, Any] = {}
    for name, change in CHANGES.items():
        results = []
        for make in (plain(AdamW, lr=1e-2), zero(AdamW, lr=1e-2)):
            ddp = wrapped(Net, bucket_cap_mb=0.02)
            opt = make(ddp)
            for _ in range(3):
                train(ddp, opt, rank, steps=2)
                change(ddp)
            train(ddp, opt, rank, steps=2)
            results.append(parameters(ddp))
        found[name] = difference(*results), *_changed_with_codec(rank, change)
    return found


def _changed_with_codec(rank: int, change: Any) -> tuple[float, ...]:
    """How far steps without a gradient, and a step of lr 1e-3, move the new values."""
    ddp = wrapped(Net)
    opt = zero(Adam, param_codec="int8", lr=1e-3, min_numel=0)(ddp)
    train(ddp, opt, rank, steps=3)
    opt.sync_parameters()
    change(ddp)
    new = parameters(ddp)
    opt.zero_grad()
    opt.step()
    unmoved = difference(new, parameters(ddp))
    train(ddp, opt, rank, steps=1)
    return unmoved, difference(new, parameters(ddp)), spread(ddp)


def test_training_goes_on_from_parameters_that_others_changed(pair: World) -> None:
    for found in pair.run(changed_from_outside):
        for name, (to_plain, unmoved, moved, apart) in found.items():
            assert (to_plain, unmoved, apart) == (0.0, 0.0, 0.0), name
            assert 0 < moved < 4e-3, name


def changed_on_one_rank(rank: int, world_size: int, way: str) -> Raised:
    ddp = wrapped(Net)
    opt = zero(AdamW, param_codec="lm4", lr=1e-3, timeout_s=20.0)(ddp)
    train(ddp, opt, rank, steps=2)
    if rank == 1 or way == "differently":
        with torch.no_grad():
            ddp.module.middle.weight.add_(1.0 + rank)
    if way == "sync":
        return raised(opt.sync_parameters)
    return raised(train, ddp, opt, rank, steps=1)


@pytest.mark.parametrize("way", ["step", "sync", "differently"])
def test_a_change_on_one_rank_only_is_refused_on_all(pair: World, way: str) -> None:
    for error in pair.run(changed_on_one_rank, way):
        assert error.is_value_error, error.text
        assert "middle.weight" in error.text
        assert error.seconds < 15


# Settings.

SETTINGS: dict[str, dict[str, Any]] = {
    "start_step": {"codec": "lm4", "start_step": 3},
    "by name": {"codec": {"middle*": "int8", "*.bias": "none", "*": "lm4"}},
    "parameters by name": {"codec": "lm4", "param_codec": {"middle*": "int8", "*": "none"}},
    "codec objects": {"codec": zcomm.codec("int4:block=32"), "param_codec": zcomm.codec("lm3")},
    "min_numel": {"codec": "lm4", "param_codec": "lm4", "min_numel": 10**6},
    "bf16 residuals": {"codec": "lm2", "feedback": 0.9, "residual_dtype": torch.bfloat16},
    "int8 residuals": {"codec": "lm2", "feedback": True, "residual_dtype": torch.int8},
}


def trained_with(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for name, settings in SETTINGS.items():
        ddp, by_ddp = wrapped(Net), wrapped(Net)
        opt = zero(SGD, lr=0.1, **settings)(ddp)
        train(ddp, opt, rank, steps=3)
        train(by_ddp, plain(SGD, lr=0.1)(by_ddp), rank, steps=3)
        exact = difference(parameters(ddp), parameters(by_ddp)) == 0
        train(ddp, opt, rank, steps=3)
        found[name] = (exact, spread(ddp))
        assert opt.handle.stats().steps == 6
        opt.close()
    return found


def test_settings_of_the_hook_are_taken(pair: World) -> None:
    for found in pair.run(trained_with):
        exact = {"start_step", "min_numel"}
        assert found == {name: (name in exact, 0.0) for name in SETTINGS}


def eager_and_compiled(rank: int, world_size: int) -> list[Any]:
    found = []
    for compiled in (False, True):
        ddp = wrapped(Net)
        model: Any = torch.compile(ddp, backend="aot_eager") if compiled else ddp
        opt = zero(SGD, lr=0.1)(model)
        for step in range(4):
            opt.zero_grad()
            backward(model, rank, step)
            opt.step()
        assert len(opt.shards) == len(trainable(ddp))
        found.append(parameters(ddp))
    return [difference(*found), spread(ddp)]


def test_a_compiled_model_trains_as_an_eager_one(pair: World) -> None:
    for gap, apart in pair.run(eager_and_compiled):
        assert gap <= 1e-6
        assert apart == 0
