"""ZeroOptimizer gives the bits of the plain optimizer, and the same ones on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from ddp_training import WAYS, Net
from ranks import World
from zero_training import (
    ROUNDING,
    among,
    backward,
    difference,
    parameters,
    plain_and_zero,
    spread,
    train,
    trained,
    wrapped,
    zero,
)

pytest_plugins = ["zero_ranks"]

BLOCK = 128


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1}),
    "nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "Adam": (Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.01}),
    "AdamW": (AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adagrad": (Adagrad, {"lr": 1e-2, "lr_decay": 0.01, "weight_decay": 0.01}),
    "RMSprop": (RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True}),
    "foreach": (AdamW, {"lr": 1e-2, "foreach": True}),
    "lr as a tensor": (AdamW, {"lr": torch.tensor(1e-2), "maximize": True}),
}
SEVERAL = {"bucket_cap_mb": 0.02}  # buckets, which DDP makes anew after the first step


def differences_of_optimizers(rank: int, world_size: int) -> dict[str, float]:
    if (group := among(2)) is None:
        return {}
    ddp = {"process_group": group, **SEVERAL}
    return {
        name: plain_and_zero(
            rank, optimizer, options, ddp=ddp, steps=12, set_to_none="foreach" not in options
        )
        for name, (optimizer, options) in OPTIMIZERS.items()
    }


def test_two_ranks_give_the_bits_of_ddp_with_the_plain_optimizer(quartet: World) -> None:
    for found in quartet.run(differences_of_optimizers)[:2]:
        assert found == dict.fromkeys(OPTIMIZERS, 0.0)


LR: dict[str, Any] = {"lr": 1e-3}
ROUNDED: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "fused AdamW": (AdamW, {"fused": True, **LR}, {}),
    "fused SGD": (SGD, {"fused": True, "momentum": 0.9, **LR}, {}),
    "fused Adagrad": (Adagrad, {"fused": True, **LR}, {}),
    "clipped SGD": (SGD, {"momentum": 0.9, **LR}, {"max_norm": 0.01}),
    "clipped AdamW": (AdamW, LR, {"max_norm": 0.01}),
    "AdamW": (AdamW, LR, {}),
}


def rounded_differences(rank: int, world_size: int, count: int) -> dict[str, float]:
    if (group := among(count)) is None:
        return {}
    ddp = {"process_group": group, **SEVERAL}
    return {
        name: plain_and_zero(rank, optimizer, options, model=narrow, ddp=ddp, steps=50, **training)
        for name, (optimizer, options, training) in ROUNDED.items()
    }


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.LayerNorm(96), nn.Linear(96, 70))


@pytest.mark.parametrize("count", [2, 3])
def test_fused_kernels_clipping_and_three_ranks_differ_by_rounding(
    quartet: World, count: int
) -> None:
    for found in quartet.run(rounded_differences, count)[:count]:
        assert found.keys() == ROUNDED.keys()
        assert all(value <= ROUNDING for value in found.values()), found


CODECS = [
    *(("lm4", "lm4"), ("lm4", None), ("int8", "lm2"), ("sign", None), ("topk:0.05", "int8")),
]


def replicas_after_200_steps(rank: int, world_size: int, count: int) -> dict[Any, Any]:
    group, found = among(count), {}
    for codec, param_codec in CODECS if group else ():
        ddp = wrapped(narrow, process_group=group)
        opt = zero(AdamW, codec, param_codec=param_codec, lr=1e-3, min_numel=0)(ddp)
        before = parameters(ddp)
        train(ddp, opt, rank, steps=200)
        moved = all(not torch.equal(p, before[name]) for name, p in parameters(ddp).items())
        found[codec, param_codec] = (moved, spread(ddp))
        opt.close()
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_replicas_are_identical_after_200_steps(quartet: World, count: int) -> None:
    for found in quartet.run(replicas_after_200_steps, count, timeout_s=400)[:count]:
        assert found == dict.fromkeys(CODECS, (True, 0.0))


def wide() -> nn.Module:
    """Several pieces per owner, and not a whole number of blocks."""
    return nn.Sequential(nn.Linear(32, 437), nn.Tanh(), nn.Linear(437, 437), nn.Linear(437, 7))


def train_in_many_ways(rank: int, world_size: int) -> dict[Any, Tensor]:
    group, found = among(3), {}
    for codecs in (("none", None), ("lm4", "lm4"), ("topk:0.05", "int8")) if group else ():
        for name, (of_ddp, of_zcomm) in WAYS.items():
            make = zero(AdamW, codecs[0], param_codec=codecs[1], lr=1e-3, **of_zcomm)
            after = trained(make, rank, wide, {"process_group": group, **of_ddp}, steps=4)
            found[codecs, name] = torch.cat([p.flatten() for p in after.values()])
    return found


def test_no_bit_depends_on_buckets_chunks_or_threads(quartet: World) -> None:
    for found in quartet.run(train_in_many_ways)[:3]:
        assert len(found) == 3 * len(WAYS)
        for (codecs, name), got in found.items():
            assert got.isfinite().all()
            assert torch.equal(got, found[codecs, "one bucket"]), (codecs, name)


def state_of_each_parameter(rank: int, world_size: int, count: int) -> dict[str, list[int]]:
    """The number of elements of each parameter, and of its states after the first step."""
    group, found = among(count), {}
    for codec, param_codec in (("none", None), ("lm4", "lm4")) if group else ():
        ddp = wrapped(Net, process_group=group)
        opt = zero(Adam, codec, param_codec=param_codec, amsgrad=True)(ddp)
        assert not opt.inner.state
        backward(ddp, rank, 0)
        opt.step()
        assert len(opt.inner.state) == len(list(ddp.parameters()))
        for name, shard in opt.shards.items():
            state = opt.inner.state[shard.tensor]
            sizes = [state[key].numel() for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")]
            found[f"{codec} {name}"] = [shard.parameter.numel(), *sizes]
        opt.close()
    return found


@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_rank_keeps_its_part_of_the_state_from_the_first_step(
    quartet: World, count: int
) -> None:
    ranks = quartet.run(state_of_each_parameter, count)[:count]
    for name, (numel, *_) in ranks[0].items():
        for found in ranks:
            assert all(abs(size - numel / count) <= BLOCK for size in found[name][1:]), found[name]
        assert sum(found[name][1] for found in ranks) == numel


def same_run_twice(rank: int, world_size: int) -> float:
    make = zero(AdamW, "lm3", param_codec="lm4", feedback=True)
    return difference(*(trained(make, rank, ddp=SEVERAL) for _ in range(2)))


def test_every_run_gives_the_same_bits(quartet: World) -> None:
    assert quartet.run(same_run_twice) == [0.0] * 4
