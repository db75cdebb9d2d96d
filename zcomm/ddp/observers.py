"""Callbacks that keep nothing alive: observers of a compressor's steps, and hooks of models."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from zcomm.ddp.buckets import Part


class Observer(Protocol):
    def take_bucket(self, index: int, parts: Sequence[Part], buffer: Tensor) -> None:
        """A bucket is about to be handed to the engine; a step begins with index 0."""

    def end_step(self) -> None:
        """All buckets of a step have been reduced."""


class Observers:
    """The observers of one compressor, which change nothing about its steps.

    It does not keep them alive. DDP's C++ part holds the compressor, where Python's collector does
    not look: an observer that knows its model would keep the model alive forever.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Observer] = weakref.WeakSet()
        self._error: BaseException | None = None

    def add(self, observer: Observer) -> None:
        self._all.add(observer)

    def discard(self, observer: Observer) -> None:
        self._all.discard(observer)

    def take_bucket(self, index: int, parts: Sequence[Part], buffer: Tensor) -> None:
        for observer in list(self._all):
            self._try(observer.take_bucket, index, parts, buffer)

    def end_step(self) -> None:
        for observer in list(self._all):
            self._try(observer.end_step)

    def _try(self, tell: Callable[..., None], *args: Any) -> None:
        """Errors wait until DDP is done: raised here, they would leave it broken."""
        try:
            tell(*args)
        except BaseException as error:
            self._error = self._error or error

    @property
    def failed(self) -> bool:
        return self._error is not None

    def raise_failure(self) -> None:
        """Raises the first error since the last time, if there is one."""
        error, self._error = self._error, None
        if error is not None:
            raise error


class WeakHook:
    """Calls a method from a hook of a model or of a parameter; in a copy of it, does nothing."""

    def __init__(self, method: Callable[[], None] | None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *_: object) -> None:
        method = self._method and self._method()
        if method is not None:
            method()

    def __reduce__(self) -> tuple[type[WeakHook], tuple[None]]:
        return WeakHook, (None,)
