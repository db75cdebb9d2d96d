"""For training with a GradScaler: the loss scale, and whether all results of a step are finite.

Both values are on the device. The host must not wait for it in backward(): it would wait for all
work enqueued before. So LossScale starts a copy before the forward pass, which has arrived by then,
and DeviceFinite is asked about a step when the next one begins.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from zcomm.ddp.observers import WeakHook
from zcomm.engine.streams import HostCopy, Streams
from zcomm.torch_private.foreach import scale_of

# Every rank's number, in rank order, from this rank's one.
Exchange = Callable[[Tensor], Tensor]


class LossScale:
    """The loss scale of the next step."""

    def __init__(self, scaler: Any, streams: Streams | None, model: Module) -> None:
        self._scaler, self._streams = scaler, streams
        self._copy: HostCopy | None = None
        self._known: float | None = None
        if scaler is not None and streams is not None:
            model.register_forward_pre_hook(WeakHook(self.note))

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


class Finite:
    """Whether all results of a step are finite. On the CPU that is known when the step ends."""

    def __init__(self) -> None:
        self._all = True

    def begin(self) -> None:
        self._all = True

    def look(self, t: Tensor) -> None:
        """Checks a result in the engine's thread and stream, which made it."""
        if t.numel() and not math.isfinite(_largest(t).item()):
            self._all = False

    def end(self, sums: Sequence[Tensor], exchange: Exchange | None) -> None:
        """Checks the step's sums, too. `exchange`: ranks have seen different results."""
        for t in sums:
            self.look(t)
        if exchange is not None:
            mine = torch.tensor([float(self._all)], dtype=torch.float64, device="cpu")
            self._all = bool(exchange(mine).all())

    def was(self) -> bool:
        """Whether the last step was finite, on all ranks."""
        return self._all


class DeviceFinite(Finite):
    """The same on a device, as one number there: 1 or 0."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        with streams.side():
            self._number = torch.ones(1, dtype=torch.float64, device=streams.device)
        self._copy: HostCopy | None = None

    def begin(self) -> None:
        with self._streams.side():
            self._number.fill_(1.0)

    def look(self, t: Tensor) -> None:
        if t.numel():
            self._number.mul_(_largest(t).isfinite())

    def end(self, sums: Sequence[Tensor], exchange: Exchange | None) -> None:
        with self._streams.side():
            for t in sums:
                self._streams.record_stream(t)
                self.look(t)
        everyone = self._number if exchange is None else exchange(self._number)
        with self._streams.side():
            self._copy = self._streams.to_host(everyone.amin(0, keepdim=True))

    def was(self) -> bool:
        return self._copy is None or bool(self._copy.values()[0])


def _largest(t: Tensor) -> Tensor:
    """The largest magnitude, NaN or Inf if any element is: one pass, no extra memory."""
    largest: Tensor = torch.linalg.vector_norm(t, math.inf)
    return largest
