"""LossScale: the scale of a GradScaler, read without waiting for the device.

The scale is on the device. Asking for it in backward() would wait for everything enqueued before.
A copy that starts before the forward pass has arrived by then.
"""

from typing import Any

from torch.nn import Module

from zcomm.ddp.forward_hooks import ForwardHook
from zcomm.engine.streams import HostCopy, Streams
from zcomm.torch_private.foreach import scale_of


class LossScale:
    """The scale of the next step."""

    def __init__(self, scaler: Any, streams: Streams | None, model: Module) -> None:
        self._scaler, self._streams = scaler, streams
        self._copy: HostCopy | None = None
        self._known: float | None = None
        if scaler is not None and streams is not None:
            model.register_forward_pre_hook(ForwardHook(self.note))

    def note(self) -> None:
        """Starts the copy. Before its first use a scaler has only a number, no tensor."""
        assert self._streams is not None
        scale = scale_of(self._scaler)
        self._copy = self._known = None
        if scale is not None:
            self._copy = self._streams.to_host(scale.view(1))
        else:
            self._known = float(self._scaler.get_scale())

    def value(self) -> float:
        """The scale; read from the scaler if there was no forward pass."""
        copy, known = self._copy, self._known
        self._copy = self._known = None
        if copy is not None:
            return float(copy.values()[0])
        return float(self._scaler.get_scale()) if known is None else known
