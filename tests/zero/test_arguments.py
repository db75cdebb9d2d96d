"""Arguments that ZeroOptimizer refuses: every rank says what it expected and what it got."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adam, AdamW, Optimizer, Rprop, SparseAdam

import zcomm
from ddp_training import Net
from raised import Raised, raised
from ranks import World
from zero_training import backward, difference, parameters, plain, train, trainable, wrapped, zero

pytest_plugins = ["ddp_ranks"]


class Lamb(Optimizer):
    """SGD with the trust ratio of LAMB: a step depends on the norm of the whole parameter."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * float(p.norm() / p.grad.norm()))


class Signed(Optimizer):
    """Moves every element by lr against the sign of an average of its gradients."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["beta"])
                p.sub_(mean.sign(), alpha=group["lr"])


def signed_by_hand(rank: int, world_size: int) -> float:
    found = []
    for make in (plain(Signed, lr=1e-2), zero(Signed, lr=1e-2)):
        ddp = wrapped(Net)
        train(ddp, make(ddp), rank)
        found.append(parameters(ddp))
    return difference(*found)


def test_an_optimizer_of_ones_own_is_taken(pair: World) -> None:
    assert pair.run(signed_by_hand) == [0.0, 0.0]


def defaults(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for kind in (SGD, AdamW, Rprop):
        opt = zcomm.ZeroOptimizer(wrapped(Net), kind)
        expected = kind([torch.zeros(1)]).defaults["lr"]
        found[kind.__name__] = opt.param_groups[0]["lr"] == opt.defaults["lr"] == expected
        found["codecs"] = set(opt.handle.state_dict()["codecs"].values())
    return found


def test_without_settings_it_is_exact_and_has_the_lr_of_its_class(pair: World) -> None:
    for found in pair.run(defaults):
        assert found == {"SGD": True, "AdamW": True, "Rprop": True, "codecs": {"none"}}


# Each rank refuses these by itself. Each row: the optimizer, its arguments, the error text.
REFUSED: dict[str, tuple[Any, dict[str, Any], str, list[str]]] = {
    "LBFGS": (LBFGS, {}, "ValueError", ["LBFGS", "element by element"]),
    "Adafactor": (Adafactor, {}, "ValueError", ["Adafactor", "element by element"]),
    "SparseAdam": (SparseAdam, {}, "ValueError", ["SparseAdam", "element by element"]),
    "trust ratio": (Lamb, {}, "ValueError", ["Lamb", "differently from the whole"]),
    "an object": (
        SGD([torch.zeros(1)]),
        {},
        "TypeError",
        ["got an object of class SGD; give"],
    ),
    "a function": (torch.add, {}, "TypeError", ["expected a class of torch.optim"]),
    "a module": (nn.Linear, {}, "TypeError", ["expected a class of torch.optim", "Linear"]),
    "lr": (AdamW, {"lr": -1.0}, "ValueError", ["Invalid learning rate: -1.0"]),
    "betas": (AdamW, {"betas": (1.5, 0.9)}, "ValueError", ["Invalid beta parameter"]),
    "unknown": (AdamW, {"chunks": 3}, "TypeError", ["got 'chunks'", "chunk_mb"]),
    "typo": (AdamW, {"weigth_decay": 0.1}, "TypeError", ["an argument of AdamW", "weight_decay"]),
    "both lists": (AdamW, {"foreback": 1}, "TypeError", ["feedback", "foreach"]),
    "nothing near": (SGD, {"zzz": 1}, "TypeError", ["codec, feedback", "scaler", "nesterov"]),
    "codec": (AdamW, {"codec": "lm5"}, "ValueError", ["lm5"]),
    "param_codec": (AdamW, {"param_codec": "lm5"}, "ValueError", ["lm5"]),
    "no pattern": (AdamW, {"param_codec": {"first*": "lm4"}}, "ValueError", ["middle.weight"]),
    "feedback": (AdamW, {"codec": "sign", "feedback": False}, "ValueError", ["feedback"]),
    "scaler": (AdamW, {"scaler": 3}, "TypeError", ["GradScaler"]),
}
if hasattr(torch.optim, "Muon"):
    REFUSED["Muon"] = (torch.optim.Muon, {}, "ValueError", ["Muon", "element by element"])


def refusals(rank: int, world_size: int) -> dict[str, Raised]:
    found = {}
    for name, (optimizer, arguments, *_) in REFUSED.items():
        ddp = wrapped(Net)
        found[name] = raised(zcomm.ZeroOptimizer, ddp, optimizer, **arguments)
        # It leaves nothing behind: the model can still take a hook, and a parameter another group.
        opt = zero(AdamW)(ddp)
        opt.close()
    return found


def test_what_cannot_be_sharded_is_refused_with_the_reason(pair: World) -> None:
    for found in pair.run(refusals):
        for name, (_, _, type_, words) in REFUSED.items():
            error = found[name]
            assert error.type == type_, (name, error.type, error.text)
            assert all(word in error.text for word in words), (name, error.text)


def wrong_models(rank: int, world_size: int) -> dict[str, Raised]:
    ddp, hooked, sharded = wrapped(Net), wrapped(Net), wrapped(Net)
    zcomm.compress(hooked)
    opt = zero(AdamW)(sharded)
    other = nn.Parameter(torch.zeros(5))
    named = trainable(ddp)
    duplicates = [{"params": named[:2]}, {"params": named[1:]}]
    return {
        "not wrapped": raised(zcomm.ZeroOptimizer, Net(), AdamW),
        "hooked": raised(zcomm.ZeroOptimizer, hooked, AdamW),
        "sharded": raised(zcomm.ZeroOptimizer, sharded, AdamW),
        "compressed": raised(zcomm.compress, sharded),
        "other parameter": raised(zcomm.ZeroOptimizer, ddp, AdamW, [*named, other]),
        "twice": raised(zcomm.ZeroOptimizer, wrapped(Net), AdamW, duplicates),
        "empty": raised(zcomm.ZeroOptimizer, wrapped(Net), AdamW, []),
        "added": raised(opt.add_param_group, {"params": [other]}),
        "added twice": raised(opt.add_param_group, {"params": trainable(sharded)[:1]}),
    }


WRONG_MODELS = {
    "not wrapped": ("TypeError", "ZeroOptimizer: expected a DistributedDataParallel, got Net"),
    "hooked": ("ValueError", "ZeroOptimizer: expected a model without a comm hook"),
    "sharded": ("ValueError", "ZeroOptimizer: expected a model without a comm hook"),
    "compressed": ("ValueError", "compress: expected a model without a comm hook"),
    "other parameter": ("ValueError", "expected parameters of the DDP model, got another one"),
    "twice": ("ValueError", "some parameters appear in more than one parameter group"),
    "empty": ("ValueError", "optimizer got an empty parameter list"),
    "added": ("ValueError", "expected parameters of the DDP model, got another one"),
    "added twice": ("ValueError", "some parameters appear in more than one parameter group"),
}


def test_models_and_parameters_that_do_not_fit_are_refused(pair: World) -> None:
    for found in pair.run(wrong_models):
        for name, (type_, text) in WRONG_MODELS.items():
            assert found[name].type == type_, (name, found[name].type, found[name].text)
            assert text in found[name].text, (name, found[name].text)


def after_a_refusal(rank: int, world_size: int) -> list[float]:
    """Training after a refused group or parameter is as if nothing had happened."""
    found = []
    for refused in (False, True):
        ddp = wrapped(Net)
        other = nn.Parameter(torch.zeros(5))
        if refused:
            raised(zcomm.ZeroOptimizer, ddp, AdamW, [*trainable(ddp), other])
        opt = zero(AdamW, lr=1e-2)(ddp)
        train(ddp, opt, rank, steps=2)
        if refused:
            raised(opt.add_param_group, {"params": [other]})
        train(ddp, opt, rank, steps=2)
        found.append(parameters(ddp))
        assert len(opt.param_groups) == 1
    return [difference(*found)]


def test_a_refusal_leaves_nothing_behind(pair: World) -> None:
    assert pair.run(after_a_refusal) == [[0.0]] * 2


def closures(rank: int, world_size: int) -> Raised:
    ddp = wrapped(Net)
    opt = zero(AdamW)(ddp)
    backward(ddp, rank, 0)
    error = raised(opt.step, lambda: 1.0)
    opt.step()
    return error


def test_a_closure_is_refused_with_the_reason(pair: World) -> None:
    for error in pair.run(closures):
        assert error.is_value_error
        assert "step: expected no closure, got one" in error.text
        assert "call backward() before step()" in error.text


# Ranks that disagree: the arguments of rank 0 and rank 1, and how the error shows each.
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str, tuple[str, str]]] = {
    "lr": ({"lr": 0.125}, {"lr": 0.25}, "param_groups", ("0.125", "0.25")),
    "betas": (
        {"betas": (0.5, 0.9)},
        {"betas": (0.75, 0.9)},
        "param_groups",
        ("(0.5, 0.9)", "(0.75, 0.9)"),
    ),
    "param_codec": (
        {"param_codec": "lm4"},
        {"param_codec": None},
        "param_codec",
        ("lm4", "None"),
    ),
    "codec": ({"codec": "lm4"}, {"codec": "int8"}, "codec", ("lm4", "int8")),
    "chunk_mb": ({"chunk_mb": 2}, {"chunk_mb": 1}, "chunk_mb", ("2", "1")),
    "class": (
        {"optimizer_class": Adam},
        {"optimizer_class": SGD},
        "optimizer",
        ("Adam", "SGD"),
    ),
    "params": ({}, {"params": slice(1, None)}, "param_groups", ("first.weight", "first.bias")),
    "order": ({}, {"params": slice(None, None, -1)}, "param_groups", ("first", "last")),
    "scaler": ({}, {"scaler": torch.amp.GradScaler("cpu")}, "scaler", ("False", "True")),
}


def make_differently(rank: int, world_size: int) -> dict[str, Raised]:
    found = {}
    for name, cases in DIFFERENT.items():
        ddp = wrapped(Net)
        mine = {"optimizer_class": AdamW, **cases[rank]}
        if "params" in mine:
            mine["params"] = trainable(ddp)[mine["params"]]
        found[name] = raised(zcomm.ZeroOptimizer, ddp, **mine)
    return found


def test_arguments_that_differ_are_named_on_every_rank(pair: World) -> None:
    for rank, found in enumerate(pair.run(make_differently)):
        for name, (_, _, setting, values) in DIFFERENT.items():
            error = found[name]
            assert error.is_value_error, (name, error.text)
            start = f"rank {rank}: expected the same {setting} on all ranks, got rank 0: "
            assert error.text.startswith(start), (name, error.text)
            first, second = error.text.removeprefix(start).split(", rank 1: ")
            assert values[0] in first, (name, error.text)
            assert values[1] in second, (name, error.text)


def later_differences(rank: int, world_size: int, what: str) -> Raised:
    """Groups that one rank changes after the start."""
    ddp = wrapped(Net)
    opt = zero(AdamW, timeout_s=20.0)(ddp, trainable(ddp)[:4])
    train(ddp, opt, rank, steps=2)
    if what == "groups":
        opt.add_param_group({"params": trainable(ddp)[4 + rank :]})
    elif rank == 1:
        opt.add_param_group({"params": trainable(ddp)[4:]})
    return raised(train, ddp, opt, rank, steps=2)


@pytest.mark.parametrize("what", ["groups", "one rank"])
def test_groups_added_differently_are_an_error_in_time(pair: World, what: str) -> None:
    for error in pair.run(later_differences, what):
        assert error.is_value_error, error.text
        assert error.seconds < 15
