"""Whether an optimizer can work on shards: it must treat every element alike.

It is tried: a small tensor as a whole, and the same in two parts, must be updated alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

ELEMENT = "one value for each element"
_SHAPE, _SIZES, _STEPS = (6, 8), [20, 28], 3
# Fused kernels round a vector's last elements in another way.
_RTOL, _ATOL = 1e-5, 1e-7


def try_on_parts(
    optimizer_class: Any, arguments: Mapping[str, Any], group: Mapping[str, Any]
) -> dict[str, Any]:
    """What state the optimizer keeps, by name: ELEMENT (a value for each element), or a sample.

    `group` are the options of a param group. Refuses an optimizer that cannot work on parts of a
    parameter, and says why.
    """
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            f"ZeroOptimizer: expected a class of torch.optim, such as torch.optim.AdamW, got {name}"
        )
    whole = torch.linspace(-1, 1, _SHAPE[0] * _SHAPE[1]).reshape(_SHAPE)
    parts = [part.clone() for part in torch.split(whole.flatten(), _SIZES)]
    try:
        state = _steps(optimizer_class([{"params": [whole], **group}], **arguments), whole, 0)
        start = 0
        for part in parts:  # each on its own, as on the ranks
            _steps(optimizer_class([{"params": [part], **group}], **arguments), part, start)
            start += part.numel()
    except Exception as error:
        raise ValueError(
            f"ZeroOptimizer: expected an optimizer whose step() updates element by element, got "
            f"{name}, which cannot: {type(error).__name__}: {error}"
        ) from error
    if not torch.allclose(torch.cat(parts), whole.flatten(), rtol=_RTOL, atol=_ATOL):
        raise ValueError(
            f"ZeroOptimizer: expected an optimizer that updates element by element, got {name}: "
            "it updates parts of a parameter differently from the whole; use it with "
            "zcomm.compress, which does not shard"
        )
    return {
        key: ELEMENT if isinstance(value, Tensor) and value.shape == whole.shape else value
        for key, value in state.items()
        if value is not None
    }


def _steps(optimizer: Optimizer, t: Tensor, start: int) -> Any:
    """A few steps with gradients that depend on the place of an element; the tensor's state."""
    numbers = torch.arange(start, start + t.numel(), dtype=torch.float32)
    for step in range(_STEPS):
        t.grad = torch.cos(numbers * (step + 1)).reshape(t.shape)
        optimizer.step()
    return optimizer.state[t]
