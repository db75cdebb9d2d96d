"""LossScale: the scale of a GradScaler, read without waiting for the device.

The scale lies on the device, and asking for it in backward() would wait for all that was enqueued
before. A copy that is started before the forward pass is there by then, with the last step.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.nn import Module

from zcomm.engine.streams import HostCopy, Streams
from zcomm.torch_private.foreach import scale_of


class LossScale:
    """The scale of the step that is next."""

    def __init__(self, scaler: Any, streams: Streams | None, model: Module) -> None:
        self._scaler, self._streams = scaler, streams
        self._copy: HostCopy | None = None
        self._known: float | None = None
        if scaler is not None and streams is not None:
            model.register_forward_pre_hook(BeforeForward(self))

    def note(self) -> None:
        """Starts the copy. Before its first use a scaler has no tensor, only a number."""
        assert self._streams is not None
        scale = scale_of(self._scaler)
        self._copy = self._known = None
        if scale is not None:
            self._copy = self._streams.to_host(scale.view(1))
        else:
            self._known = float(self._scaler.get_scale())

    def value(self) -> float:
        """The scale; where no forward pass has gone before, it is asked for."""
        copy, known = self._copy, self._known
        self._copy = self._known = None
        if copy is not None:
            return float(copy.values()[0])
        return float(self._scaler.get_scale()) if known is None else known


class BeforeForward:
    """A forward hook of the model; a copy of the model has one without a scale."""

    def __init__(self, scale: LossScale | None) -> None:
        self._scale = None if scale is None else weakref.ref(scale)

    def __call__(self, *_: object) -> None:
        scale = None if self._scale is None else self._scale()
        if scale is not None:
            scale.note()

    def __reduce__(self) -> tuple[type[BeforeForward], tuple[None]]:
        return BeforeForward, (None,)
