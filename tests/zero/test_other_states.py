"""States that do not fit a ZeroOptimizer: refused before anything changes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD

import zcomm
from ddp_training import batch
from everyones import everyones
from raised import Raised, raised
from ranks import World
from zcomm.zero.elementwise import options_of
from zero_checkpoints import BOTH_WAYS, Training
from zero_training import trainable

pytest_plugins = ["ddp_ranks"]

IN_TWO = {"params": [slice(2), slice(2, None)]}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "one group": (IN_TWO, {"params": [slice(None)]}, "param_groups"),
    "other order": (IN_TWO, {"params": [slice(2, None), slice(2)]}, "param_groups"),
    "no momentum": ({"optimizer": SGD, "momentum": 0.9}, {"optimizer": SGD}, "state"),
    "feedback on": ({"codec": "lm4"}, {"codec": "lm4", "feedback": True}, "feedback"),
    "feedback off": ({"codec": "lm4", "feedback": True}, {"codec": "lm4"}, "feedback"),
}


def made(settings: dict[str, Any]) -> Training:
    """A training run; `params` splits the parameters into groups, each with its own lr."""
    cuts = settings.get("params")
    training = Training({key: value for key, value in settings.items() if key != "params"})
    if cuts is None:
        return training
    groups = [{"params": trainable(training.ddp)[cut], "lr": i + 1.0} for i, cut in enumerate(cuts)]
    training.ddp = type(training.ddp)(training.model)
    training.opt = zcomm.ZeroOptimizer(training.ddp, torch.optim.AdamW, groups)
    return training


def load_into_others(rank: int, world_size: int, folder: Path) -> dict[str, list[Raised]]:
    """From a checkpoint and from memory; after a refusal, training continues unchanged."""
    found = {}
    for name, (saved, other, _) in OTHERS.items():
        training = made(saved)
        training.run(rank, range(1))
        zcomm.save_checkpoint(folder / name, training.parts(), 1)
        new = made(other)
        options = [options_of(group) for group in new.opt.param_groups]
        found[name] = [
            raised(zcomm.load_checkpoint, folder / name, new.parts()),
            raised(new.opt.load_state_dict, training.opt.state_dict()),
        ]
        assert options == [options_of(group) for group in new.opt.param_groups]
        new.run(rank, range(1))
    return found


def test_a_state_of_other_groups_or_options_is_refused(pair: World, tmp_path: Path) -> None:
    for found in pair.run(load_into_others, tmp_path):
        for name, (_, _, field) in OTHERS.items():
            for error in found[name]:
                assert error.is_value_error, (name, error.type, error.text)
                assert f"load_state_dict: expected {field} " in error.text, (name, error.text)


def load_that_of_another_rank(rank: int, world_size: int) -> tuple[Raised, float, int]:
    training = Training(BOTH_WAYS)
    training.run(rank, range(2))
    everyone = everyones(pickle.dumps(training.opt.state_dict()))
    new = Training({**BOTH_WAYS, "lr": 0.5})
    error = raised(new.opt.load_state_dict, pickle.loads(everyone[1 - rank]))
    return error, new.opt.param_groups[0]["lr"], len(new.opt.inner.state)


def test_a_refused_state_changes_nothing(pair: World) -> None:
    for error, lr, states in pair.run(load_that_of_another_rank):
        assert error.is_value_error
        assert "a state of another rank" in error.text
        assert (lr, states) == (0.5, 0)


ORDINARY = {  # who saved, with a step or before it; who loads; the error
    "SGD": (SGD, 0, torch.optim.AdamW, "the state of AdamW, got that of another optimizer class"),
    "AdamW": (torch.optim.AdamW, 0, SGD, "class, with 'amsgrad'"),
    "Adam": (torch.optim.Adam, 1, torch.optim.AdamW, "class, with decoupled_weight_decay=False"),
    "NAdam": (torch.optim.NAdam, 0, torch.optim.Adamax, "class, with 'momentum_decay'"),
}
if "decoupled_weight_decay" not in torch.optim.AdamW([torch.zeros(1)]).param_groups[0]:
    del ORDINARY["Adam"]  # older versions of torch give both the same options


def load_those_of_other_classes(rank: int, world_size: int) -> tuple[dict[str, Raised], Any]:
    """A state that an older torch saved has fewer options, and is taken."""
    found, new = {}, Training({})
    for name, (saving, steps, loading, _) in ORDINARY.items():
        new = Training({"optimizer": loading, "lr": 0.5})
        old = saving(new.model.parameters(), lr=0.25)
        for _ in range(steps):
            new.model(batch(rank, 0)).square().mean().backward()
            old.step()
            old.zero_grad()
        found[name] = raised(new.opt.load_state_dict, old.state_dict())
        assert new.opt.param_groups[0]["lr"] == 0.5
    state = loading(new.model.parameters(), lr=0.25).state_dict()
    del state["param_groups"][0]["maximize"], state["param_groups"][0]["foreach"]
    new.opt.load_state_dict(state)
    return found, new.opt.param_groups[0]["lr"]


def test_a_state_of_another_class_is_refused(pair: World) -> None:
    for found, lr in pair.run(load_those_of_other_classes):
        for name, (_, _, _, text) in ORDINARY.items():
            assert found[name].is_value_error, name
            assert text in found[name].text, (name, found[name].text)
        assert lr == 0.25
