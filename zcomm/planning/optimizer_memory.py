"""The memory of an optimizer, measured by letting it take steps on small tensors.

Its state lives between steps. A step's temporaries live for one parameter at a time, next to what
is left of the previous one; or, with foreach=True, for all parameters at once.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm.base import arguments
from zcomm.torch_private.optimizers import without_compiler
from zcomm.torch_private.tensors import DispatchMode, storage_key, tree_leaves

_SIDE = 48  # the small tensors are square: some optimizers want matrices
_NUMEL = _SIDE * _SIDE
_STEPS = 2  # the first one also sets up the state
_KNOWN = {
    name.lower(): found
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer
}


class OptimizerMemory(NamedTuple):
    """Bytes of the state, and of a step's temporaries."""

    per_element: float
    per_parameter: int
    step_alone: float  # per element of the parameter being updated
    step_before: float  # per element of the previous one
    step_all: float  # per element of all parameters together

    def state_nbytes(self, sizes: Sequence[int]) -> int:
        return int(self.per_element * sum(sizes)) + self.per_parameter * len(sizes)

    def step_nbytes(self, sizes: Sequence[int]) -> int:
        pairs = zip(sizes, [0, *sizes])
        largest = max((self.step_alone * n + self.step_before * m for n, m in pairs), default=0)
        return int(largest + self.step_all * sum(sizes))


def optimizer_class(optimizer: Any) -> Any:
    """A class of torch.optim, given as itself or by name, in any case."""
    if isinstance(optimizer, str):
        if optimizer.lower() not in _KNOWN:
            raise ValueError(
                f"optimizer: expected one of {', '.join(sorted(_KNOWN))}, got {optimizer!r}; give "
                "the class of another one"
            )
        return _KNOWN[optimizer.lower()]
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise TypeError(
            "optimizer: expected a name such as 'adamw' or a class of torch.optim, got "
            f"{arguments.describe(optimizer)}"
        )
    return optimizer


def optimizer_memory(
    kind: Any, options: Mapping[str, Any], dtype: torch.dtype, flat: bool
) -> OptimizerMemory:
    """For parameters of this dtype; `flat` means one-dimensional, as shards are."""

    def needed(sizes: Sequence[int]) -> float:
        trial.restart([torch.zeros(n if flat else (n // _SIDE, _SIDE), dtype=dtype) for n in sizes])
        return trial.most_nbytes / _NUMEL

    trial = _Trial(kind, options)
    alone, three, six = needed([_SIDE, _NUMEL, _SIDE]), needed([_NUMEL] * 3), needed([_NUMEL] * 6)
    state = trial.state()
    if six > 1.5 * three:
        return OptimizerMemory(*state, 0.0, 0.0, six / 6)
    alone = min(float(round(alone)), three)
    return OptimizerMemory(*state, alone, three - alone, 0.0)


class _Trial:
    """Steps of an optimizer on tensors of zeros."""

    def __init__(self, kind: Any, options: Mapping[str, Any]) -> None:
        self._kind, self._options = kind, options
        self.most_nbytes = 0

    def restart(self, tensors: list[Tensor]) -> None:
        name = self._kind.__name__
        try:
            kind = without_compiler(self._kind)
            self._optimizer = kind([{"params": tensors}], **self._options)
            for _ in range(_STEPS):
                for t in tensors:
                    t.grad = torch.ones_like(t)
                counter = _MemoryCounter()
                with counter:
                    self._optimizer.step()
        except Exception as error:
            raise ValueError(
                f"optimizer: expected arguments that {name} takes, and one that steps without a "
                f"closure, got an error: {type(error).__name__}: {error}"
            ) from error
        self.most_nbytes = counter.most

    def state(self) -> tuple[float, int]:
        """Bytes of a parameter's state: per element, and per parameter."""
        elements, whole = 0, 0
        p = self._optimizer.param_groups[0]["params"][0]
        for key, value in self._optimizer.state[p].items():
            if not isinstance(value, Tensor):
                continue
            if value.shape == p.shape:
                elements += value.element_size()
            elif value.numel() == 1:
                whole += value.nbytes
            else:
                raise ValueError(
                    f"optimizer: expected one that keeps a value for each element, got "
                    f"{self._kind.__name__}, whose {key!r} has another shape than its parameter; "
                    "add up its state yourself, and plan the rest with 'sgd'"
                )
        return elements, whole


class _Counting:
    """The methods of _MemoryCounter. torch wraps those that a mode defines itself: the wrapper
    imports the compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            storage_key(t.untyped_storage()) for t in tree_leaves(args) if isinstance(t, Tensor)
        }
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, Tensor) and storage_key(t.untyped_storage()) not in known:
                self._add(t.untyped_storage())
        return made

    def _add(self, storage: Any) -> None:
        key, nbytes = storage_key(storage), storage.nbytes()
        if key in self._alive:
            return

        def gone(_: Any) -> None:
            del self._alive[key]
            self.now -= nbytes

        self._alive[key] = weakref.ref(storage, gone)
        self.now += nbytes
        self.most = max(self.most, self.now)


class _MemoryCounter(_Counting, DispatchMode):  # type: ignore[misc]
    """Counts the memory of all tensors created in its context, while they live."""
