"""Whether an optimizer works on shards: it must update each element independently of the others.

zcomm tries it out: a small tensor must get the same update as a whole and in two parts.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm.torch_private.optimizers import without_compiler

ELEMENT = "one value for each element"
_SHAPE, _SIZES, _STEPS = (6, 8), [20, 28], 3
# What torch has added to its classes over time: a state that an older torch saved lacks them.
_NEWER_OPTIONS = {
    *("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay")
}
# Fused kernels round the last elements of a vector differently.
_RTOL, _ATOL = 1e-5, 1e-7


@dataclass(frozen=True)
class OptimizerSpec:
    """A torch optimizer class and its keyword arguments; refuses what is no optimizer class."""

    optimizer_class: Any
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        given = self.optimizer_class
        if not (isinstance(given, type) and issubclass(given, Optimizer)):
            name = getattr(given, "__name__", f"an object of class {type(given).__name__}")
            raise TypeError(
                f"ZeroOptimizer: expected a class of torch.optim, such as torch.optim.AdamW, got "
                f"{name}; give the class and its arguments: "
                "ZeroOptimizer(ddp, torch.optim.AdamW, lr=1e-3)"
            )

    def expect_known(self, names: Sequence[str], settings: Sequence[str]) -> None:
        """Refuses a keyword that the class does not take, and suggests the nearest names."""
        takes = inspect.signature(self.optimizer_class).parameters
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values()):
            return
        known = list(dict.fromkeys([*settings, *(name for name in takes if name != "params")]))
        for name in names:
            if name not in takes:
                near = get_close_matches(name, known) or known
                raise TypeError(
                    f"ZeroOptimizer: expected a setting of zcomm or an argument of "
                    f"{self.optimizer_class.__name__}, got {name!r}; the nearest are "
                    f"{', '.join(near)}"
                )

    def other_class(self, group: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
        """How a saved param group shows that another class saved it; "" if it does not."""
        takes = inspect.signature(self.optimizer_class).parameters
        defaults = self.make([torch.zeros(1)]).defaults
        foreign = _options_of_torch() - {*defaults, *group}
        for name in sorted({*defaults, *saved} - _NEWER_OPTIONS):
            if name in defaults and name not in saved:
                return f"without {name!r}"
            if name in foreign:
                return f"with {name!r}"
        for name, fixed in defaults.items():  # AdamW has Adam's options, one of them fixed
            if name not in takes and saved.get(name, fixed) != fixed:
                return f"with {name}={saved[name]}"
        return ""

    def make(self, groups: Any) -> Any:
        return self.optimizer_class(groups, **self.options)

    def defaults(self) -> dict[str, Any]:
        self.state_kinds({})
        defaults: dict[str, Any] = self.make([torch.zeros(1)]).defaults
        return defaults

    def state_kinds(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The state that the optimizer keeps, by name: ELEMENT (a value per element), or a sample.

        Refuses an optimizer that cannot update a parameter of this param group in parts.
        """
        name = self.optimizer_class.__name__
        whole = torch.linspace(-1, 1, _SHAPE[0] * _SHAPE[1]).reshape(_SHAPE)
        parts = [part.clone() for part in torch.split(whole.flatten(), _SIZES)]
        try:
            state = self._try(whole, 0, group)
            for part, start in zip(parts, (0, _SIZES[0])):  # each as on a rank of its own
                self._try(part, start, group)
        except Exception as error:
            raise ValueError(
                f"ZeroOptimizer: expected an optimizer whose step() updates element by element, "
                f"got {name}, which cannot: {type(error).__name__}: {error}"
            ) from error
        if not torch.allclose(torch.cat(parts), whole.flatten(), rtol=_RTOL, atol=_ATOL):
            raise ValueError(
                f"ZeroOptimizer: expected an optimizer that updates element by element, got "
                f"{name}: it updates parts of a parameter differently from the whole; use it with "
                "zcomm.compress, which does not shard"
            )
        return {
            key: ELEMENT if isinstance(value, Tensor) and value.shape == whole.shape else value
            for key, value in state.items()
            if value is not None
        }

    def initial_state(self, t: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a shard before its first step, as torch's own functions make it up: that
        after a step with a gradient and a learning rate of zero."""
        copied = t.detach().clone()
        copied.grad = torch.zeros_like(copied)
        options = options_of(group)
        if "lr" in options:
            options["lr"] = options["lr"] * 0
        optimizer = self.make([{**options, "params": [copied]}])
        optimizer.step()
        return {key: value for key, value in optimizer.state[copied].items() if value is not None}

    def _try(self, t: Tensor, start: int, group: Mapping[str, Any]) -> Any:
        """Runs a few steps on elements `start` and up of a parameter; returns their state."""
        kind: Any = without_compiler(self.optimizer_class)
        optimizer = kind([{**options_of(group), "params": [t]}], **self.options)
        numbers = torch.arange(start, start + t.numel(), dtype=torch.float32)
        for step in range(_STEPS):
            t.grad = torch.cos(numbers * (step + 1)).reshape(t.shape)  # depends on the position
            optimizer.step()
        return optimizer.state[t]


@cache
def _options_of_torch() -> frozenset[str]:
    """The options of all classes of torch.optim."""
    kinds = [k for k in vars(torch.optim).values() if isinstance(k, type) and k is not Optimizer]
    takes = [inspect.signature(kind).parameters for kind in kinds if issubclass(kind, Optimizer)]
    return frozenset(name for names in takes for name in names)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group without its parameters."""
    return {key: v for key, v in group.items() if key not in ("params", "param_names")}
