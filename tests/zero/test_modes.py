"""ZeroOptimizer in DDP's modes and torch's training loops matches plain DDP bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from ddp_training import Branches, Checkpointed, Net
from ranks import World
from zero_training import (
    Assorted,
    Make,
    Model,
    backward,
    channels_last,
    difference,
    parameters,
    plain,
    plain_and_zero,
    spread,
    train,
    trainable,
    wrapped,
    zero,
)

pytest_plugins = ["ddp_ranks"]

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def only(branch: str) -> nn.Module:
    net = Branches()
    net.branch = branch
    return net


def one_each(net: Any, rank: int, step: int) -> None:
    net.branch = ["middle", "other"][rank]


def in_turns(net: Any, rank: int, step: int) -> None:
    net.branch = ["middle", "other", "both"][step % 3]


class Scenario(NamedTuple):
    model: Model
    ddp: dict[str, Any]
    training: dict[str, Any] = {}  # noqa: RUF012


FEW = {"bucket_cap_mb": 0.02}  # several buckets
VIEWS = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
ZEROED = {"set_to_none": False}
IMAGES = {"shape": (4, 8, 7, 7)}
SCENARIOS = {
    "default": Scenario(Net, {}),
    "zeroed": Scenario(Net, FEW, ZEROED),
    "ddp.zero_grad": Scenario(Net, FEW, {"zero_grad": "ddp"}),
    "ddp.zero_grad, zeroed": Scenario(Net, FEW, {"zero_grad": "ddp"} | ZEROED),
    "zero_grad after forward": Scenario(Net, FEW, {"zero_grad": "late"}),
    "zeroed after forward": Scenario(Net, FEW, {"zero_grad": "late"} | ZEROED),
    "static graph": Scenario(Net, STATIC | FEW),
    "static graph, unused": Scenario(partial(only, "middle"), STATIC),
    "unused": Scenario(partial(only, "middle"), UNUSED),
    "unused, zeroed": Scenario(partial(only, "middle"), UNUSED, ZEROED),
    "unused on one rank": Scenario(Branches, UNUSED | FEW, {"before_step": one_each}),
    "unused in turns": Scenario(Branches, UNUSED | FEW, {"before_step": in_turns}),
    "unused in turns, zeroed": Scenario(Branches, UNUSED, {"before_step": in_turns} | ZEROED),
    "bucket views": Scenario(Net, VIEWS | FEW),
    "bucket views, zeroed": Scenario(Net, VIEWS | FEW, ZEROED),
    "bucket views, unused": Scenario(partial(only, "middle"), VIEWS | UNUSED),
    "bucket views, turns": Scenario(Branches, VIEWS | UNUSED | FEW, {"before_step": in_turns}),
    "bucket views, late": Scenario(Net, VIEWS | FEW, {"zero_grad": "late"}),
    "bucket views, zeroed late": Scenario(Net, VIEWS | FEW, {"zero_grad": "late"} | ZEROED),
    "no_sync": Scenario(Net, FEW, {"accumulate": 3}),
    "no_sync, zeroed": Scenario(Net, FEW, {"accumulate": 3} | ZEROED),
    "no_sync, turns": Scenario(Branches, UNUSED, {"before_step": in_turns, "accumulate": 2}),
    "no_sync, bucket views": Scenario(Net, VIEWS, {"accumulate": 2}),
    "no_sync, bucket views, zeroed": Scenario(Net, VIEWS, {"accumulate": 2} | ZEROED),
    "channels last": Scenario(channels_last, {}, IMAGES),
    "channels last, bucket views": Scenario(channels_last, VIEWS, IMAGES),
    "tied, frozen and odd": Scenario(Assorted, {"bucket_cap_mb": 0.0001}),
    "tied, frozen and odd, views": Scenario(Assorted, VIEWS),
    "checkpoint": Scenario(partial(Checkpointed, False), FEW),
    "reentrant checkpoint": Scenario(partial(Checkpointed, True), FEW),
}


def differences_of(rank: int, world_size: int, name: str, group: Any = None) -> list[float]:
    model, ddp, training = SCENARIOS[name]
    ddp = {"process_group": group, **ddp}
    return [
        plain_and_zero(rank, optimizer, options, model=model, ddp=ddp, **training)
        for optimizer, options in ((AdamW, ADAMW), (SGD, MOMENTUM))
    ]


@pytest.mark.parametrize("name", SCENARIOS)
def test_without_a_codec_it_is_plain_ddp_bit_for_bit(pair: World, name: str) -> None:
    assert pair.run(differences_of, name) == [[0.0, 0.0]] * 2


def several_synchronised_backwards(rank: int, world_size: int) -> dict[str, float]:
    ways = {"": {}, "views": VIEWS, "unused": UNUSED}
    accumulation = {"accumulate": 3, "synchronised": True}
    return {
        f"{name}, {set_to_none}": plain_and_zero(
            rank, SGD, MOMENTUM, ddp=ddp | FEW, set_to_none=set_to_none, **accumulation
        )
        for name, ddp in ways.items()
        for set_to_none in (True, False)
    }


def test_synchronised_backwards_before_a_step_add_up(pair: World) -> None:
    """DDP averages the first gradients again in the second backward(), which rounds."""
    for found in pair.run(several_synchronised_backwards):
        assert all(value <= 1e-6 for value in found.values()), found


def one_rank_alone(rank: int, world_size: int) -> dict[str, list[float]]:
    """Every rank trains in its own group of one."""
    group = [dist.new_group([r]) for r in range(world_size)][rank]
    names = ("default", "zeroed", "unused in turns", "bucket views", "no_sync", "channels last")
    return {name: differences_of(rank, world_size, name, group) for name in names}


def test_one_rank_is_plain_torch(pair: World) -> None:
    for found in pair.run(one_rank_alone):
        assert all(value == [0.0, 0.0] for value in found.values()), found


# What an optimizer is given.


def groups(ddp: nn.Module) -> list[dict[str, Any]]:
    *others, last, bias = trainable(ddp)
    return [
        {"params": others, "lr": 0.05},
        {"params": [last], "weight_decay": 0.0},
        {"params": (p for p in [bias])},
    ]


def with_a_frozen_group(ddp: nn.Module) -> list[dict[str, Any]]:
    frozen = [p for p in ddp.parameters() if not p.requires_grad]
    return [{"params": frozen, "lr": 1.0}, {"params": trainable(ddp)}]


GIVEN: dict[str, Any] = {
    "groups": groups,
    "a frozen group": with_a_frozen_group,
    "an iterable": lambda ddp: tuple(ddp.parameters()),
    "a generator": lambda ddp: (p for p in ddp.parameters()),
    "named": lambda ddp: ddp.named_parameters(),
    "named groups": lambda ddp: [{"params": list(ddp.module.named_parameters()), "lr": 0.02}],
}


def trained_with_params(rank: int, make: Make, params: Any, model: Model) -> dict[str, Tensor]:
    ddp = wrapped(model)
    train(ddp, make(ddp, params(ddp)), rank)
    return parameters(ddp)


def differences_of_params(rank: int, world_size: int) -> dict[str, list[float]]:
    makes = plain(AdamW, **ADAMW), zero(AdamW, **ADAMW)
    return {
        name: [
            difference(*(trained_with_params(rank, make, params, model) for make in makes))
            for model in (Net, Assorted)
        ]
        for name, params in GIVEN.items()
    }


def test_params_are_given_as_to_any_optimizer(pair: World) -> None:
    for found in pair.run(differences_of_params):
        assert found == {name: [0.0, 0.0] for name in GIVEN}


def a_subset(rank: int, world_size: int) -> list[Any]:
    """Each of two optimizers has half of the parameters; their gradients are ordinary ones."""
    found = []
    for make in (plain(AdamW, **ADAMW), zero(AdamW, **ADAMW)):
        ddp = wrapped(Net, **FEW)
        some, others = trainable(ddp)[:3], trainable(ddp)[3:]
        opts = [make(ddp, some), SGD(others, **MOMENTUM)]
        for step in range(6):
            ddp.zero_grad()
            backward(ddp, rank, step)
            assert all(type(p.grad) is torch.Tensor for p in others)
            for opt in opts:
                opt.step()
        found.append((parameters(ddp), {str(i): p.grad for i, p in enumerate(others)}))
    return [difference(a, b) for a, b in zip(*found)]


def test_parameters_of_another_optimizer_keep_an_ordinary_gradient(pair: World) -> None:
    assert pair.run(a_subset) == [[0.0, 0.0]] * 2


def a_group_later(rank: int, world_size: int) -> float:
    found = []
    for make in (plain(AdamW, **ADAMW), zero(AdamW, **ADAMW)):
        ddp = wrapped(Net, **FEW)
        opt = make(ddp, trainable(ddp)[:4])
        train(ddp, opt, rank, steps=3)
        ddp.zero_grad()  # what nobody trained has gathered gradients
        opt.add_param_group({"params": trainable(ddp)[4:], "lr": 0.05})
        train(ddp, opt, rank, steps=3)
        found.append(parameters(ddp))
    return difference(*found)


def test_a_group_can_be_added_later(pair: World) -> None:
    assert pair.run(a_group_later) == [0.0, 0.0]


# What all modes have in common, with codecs.


def compressed_modes(rank: int, world_size: int) -> dict[str, float]:
    found = {}
    for name, (model, ddp_options, training) in SCENARIOS.items():
        ddp = wrapped(model, **ddp_options)
        opt = zero(AdamW, "lm4", param_codec="lm4", feedback=True, min_numel=1, lr=1e-3)(ddp)
        train(ddp, opt, rank, **training)
        found[name] = spread(ddp)
        opt.close()
    return found


def test_compressed_replicas_stay_equal_in_every_mode(pair: World) -> None:
    for found in pair.run(compressed_modes):
        assert found == dict.fromkeys(SCENARIOS, 0.0)


def unused_parameters(rank: int, world_size: int) -> dict[str, Any]:
    """What happened to a parameter that no rank uses, and to one that only rank 0 uses."""
    found = {}
    for name, model, ddp_options in (
        ("nobody", partial(only, "middle"), UNUSED),
        ("nobody, views", partial(only, "middle"), UNUSED | VIEWS),
        ("rank 1", Branches, UNUSED),
    ):
        ddp = wrapped(model, **ddp_options)
        opt = zero(AdamW, **ADAMW)(ddp)
        before = ddp.module.other.weight.detach().clone()
        train(ddp, opt, rank, steps=3, before_step=one_each if name == "rank 1" else None)
        p = ddp.module.other.weight
        found[name] = (p.grad is None, torch.equal(p, before))
    return found


def test_parameters_that_no_rank_uses_are_not_decayed(pair: World) -> None:
    for found in pair.run(unused_parameters):
        assert found == {
            "nobody": (True, True),
            "nobody, views": (True, True),
            "rank 1": (False, False),
        }
