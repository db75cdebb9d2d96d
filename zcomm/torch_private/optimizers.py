"""torch.optim: optimizers that leave torch's compiler alone.

torch wraps add_param_group() and step(). The wrappers import the compiler, to tell it what not to
compile, which takes most of a second. Who only tries out an optimizer does not need it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer, optimizer

from zcomm.torch_private.probe import Corner

_GRAD_MODE = "_use_grad_for_differentiable"
_EAGER = "_disable_dynamo"
_corner = Corner(f"torch.optim.optimizer.{_GRAD_MODE}", f"torch.{_EAGER}")
missing = _corner.missing


def without_compiler(kind: type[Optimizer]) -> type[Optimizer]:
    """A class that does the same as this one of torch.optim, and does not import the compiler.

    What is not torch's stays as it is: any other class, which may count its subclasses, and
    wrappers that are not known. Those may import the compiler.
    """
    if not kind.__module__.startswith("torch.optim."):
        return kind
    methods = {name: _unwrapped(getattr(kind, name)) for name in ("add_param_group", "step")}
    return type(kind.__name__, (kind,), methods)


def _unwrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method without torch's wrappers, up to the first one that is not torch's."""
    inner = getattr(method, "__wrapped__", None)
    if inner is None:
        return method
    if _is_made_by(getattr(optimizer, _GRAD_MODE, None), method):
        return _with_grad_mode(inner)
    eager, hooks = getattr(torch, _EAGER, None), getattr(Optimizer, "profile_hook_step", None)
    # A new class gets the hooks again with its first optimizer.
    if _is_made_by(eager, method) or _is_made_by(hooks, method):
        return _unwrapped(inner)
    return method


def _is_made_by(wrapper: Any, method: Callable[..., Any]) -> bool:
    """Whether this wrapper of torch made the method: they then share their code."""
    made = getattr(wrapper and wrapper(lambda: None), "__code__", None)
    return made is not None and made is getattr(method, "__code__", None)


def _with_grad_mode(step: Callable[..., Any]) -> Callable[..., Any]:
    """What torch's wrapper of step() does besides."""

    @functools.wraps(step)
    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return stepped
