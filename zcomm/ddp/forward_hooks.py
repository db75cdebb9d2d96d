"""ForwardHook: calls a method when a model runs its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod


class ForwardHook:
    """Does not keep the method's object alive. In a copy of the model it does nothing."""

    def __init__(self, method: Callable[[], None] | None) -> None:
        self._method = None if method is None else WeakMethod(method)

    def __call__(self, *_: object) -> None:
        method = self._method and self._method()
        if method is not None:
            method()

    def __reduce__(self) -> tuple[type[ForwardHook], tuple[None]]:
        return ForwardHook, (None,)
