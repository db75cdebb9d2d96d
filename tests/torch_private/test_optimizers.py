"""Optimizers that leave the compiler alone do what torch's own do."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from zcomm.torch_private.optimizers import without_compiler

# SparseAdam takes sparse gradients only, LBFGS a closure.
KINDS = [
    kind
    for kind in vars(optim).values()
    if isinstance(kind, type)
    and issubclass(kind, optim.Optimizer)
    and kind not in (optim.Optimizer, optim.SparseAdam, optim.LBFGS)
]
FOREACH = [kind for kind in KINDS if "foreach" in kind.__init__.__code__.co_varnames]
TRY_IN_A_NEW_PROCESS = """
import sys, torch
from zcomm.torch_private.optimizers import without_compiler
p = torch.zeros(4, 4, requires_grad=True)
optimizer = without_compiler(getattr(torch.optim, sys.argv[1]))([p], lr=0.1)
p.grad = torch.ones_like(p)
optimizer.step()
print(bool(p.any()), 'torch._dynamo' in sys.modules)
"""


def after_steps(kind: Any, **options: Any) -> list[Tensor]:
    """The parameter and its state."""
    p = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
    optimizer = kind([{"params": [p]}], lr=0.1, **options)
    for step in range(3):
        p.grad = torch.cos(torch.arange(16.0) * (step + 1)).reshape(4, 4)
        optimizer.step()
    state = [value for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    return [p.detach(), *state]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_it_steps_like_the_class_itself(kind: Any) -> None:
    for options in ({}, {"foreach": True}) if kind in FOREACH else ({},):
        expected, found = (after_steps(k, **options) for k in (kind, without_compiler(kind)))
        assert len(expected) == len(found)
        assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_it_imports_no_compiler(name: str) -> None:
    command = [sys.executable, "-c", TRY_IN_A_NEW_PROCESS, name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_hooks_and_the_grad_mode_are_those_of_torch() -> None:
    seen = []
    kind = without_compiler(optim.SGD)
    p = torch.ones(3, requires_grad=True)
    optimizer = kind([p], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    p.grad = torch.ones(3)
    optimizer.step(lambda: seen.append(torch.is_grad_enabled()))
    assert seen == ["before", True, "after"]
    assert torch.is_grad_enabled()
    assert optim.SGD.step is not kind.step
    assert kind.__name__ == "SGD"


def test_a_class_of_someone_else_is_left_alone() -> None:
    class Own(optim.SGD):
        pass

    assert without_compiler(Own) is Own


def test_a_torch_with_other_wrappers_steps_as_it_does_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if torch had none of the names by which its wrappers are told: they stay."""
    module = importlib.import_module("torch.optim.optimizer")
    expected = after_steps(optim.AdamW)
    monkeypatch.delattr(module, "_use_grad_for_differentiable")
    monkeypatch.delattr(torch, "_disable_dynamo")
    kind = without_compiler(optim.AdamW)
    assert kind.__dict__["step"].__code__.co_name == "_use_grad"
    assert kind.__dict__["add_param_group"] is optim.Optimizer.add_param_group
    assert all(map(torch.equal, expected, after_steps(kind)))
