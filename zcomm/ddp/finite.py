"""Finite: whether all results of a step are, with a GradScaler.

On the CPU that is known when a step ends. A device knows it first; the host asks when the next step
begins.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zcomm.engine.streams import HostCopy, Streams

# Every rank's number, in rank order, from this rank's one.
Exchange = Callable[[Tensor], Tensor]


class Finite:
    """On the CPU."""

    def __init__(self) -> None:
        self._all = True

    def begin(self) -> None:
        """A step begins."""
        self._all = True

    def look(self, t: Tensor) -> None:
        """At a result, where it is made: in the engine's thread and stream."""
        if t.numel() and not math.isfinite(_largest(t).item()):
            self._all = False

    def end(self, sums: Sequence[Tensor], exchange: Exchange | None) -> None:
        """The step has these sums too. With `exchange`, ranks have seen different results."""
        for t in sums:
            self.look(t)
        if exchange is not None:
            mine = torch.tensor([float(self._all)], dtype=torch.float64, device="cpu")
            self._all = bool(exchange(mine).all())

    def was(self) -> bool:
        """Whether the last step was finite, on all ranks."""
        return self._all


class DeviceFinite(Finite):
    """On a device: one number there, 1 or 0."""

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
    """One pass, no memory: the largest magnitude is NaN or Inf if any element is."""
    largest: Tensor = torch.linalg.vector_norm(t, math.inf)
    return largest
