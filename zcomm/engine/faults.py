"""Faults: what decoders on a device find, without anyone waiting for it.

A decoder that refuses a wire lowers a number on the device (all bits one: nothing found). A job's
numbers are copied to the host after its last decode, and read once they have arrived.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcomm.engine.streams import HostCopy, Streams
from zcomm.wire.header import WireError

# Decodes whose numbers go to the host together.
_COUNT = 64
_NONE = -1


def explain(value: int, layout: Any) -> WireError:
    """What a number of a device's decoder means."""
    from zcomm.kernels import device  # imported only after a device has run

    return device.fault_error(value, layout)


class Decode(NamedTuple):
    """One decoder call: its layout, and the error to raise if it refused a wire."""

    layout: Any
    refused: Callable[[WireError], WireError]


class Findings:
    """The numbers of some decodes, on their way to the host."""

    def __init__(self, decodes: list[Decode], numbers: HostCopy) -> None:
        self._decodes, self._numbers = decodes, numbers

    def error(self) -> WireError | None:
        """Of the first decode that refused a wire."""
        for decode, value in zip(self._decodes, self._numbers.values()):
            if value != _NONE:
                return decode.refused(explain(value, decode.layout))
        return None


class Faults:
    """The numbers of one engine. All calls are made with the side stream current."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._numbers = torch.full((_COUNT,), _NONE, dtype=torch.int64, device=streams.device)
        self._decodes: list[Decode] = []
        self._full: list[Findings] = []

    def take(self, layout: Any, refused: Callable[[WireError], WireError]) -> Tensor:
        """The number of the decode that comes next."""
        if len(self._decodes) == _COUNT:
            self._send()
        at = len(self._decodes)
        self._decodes.append(Decode(layout, refused))
        return self._numbers[at : at + 1]

    def collect(self) -> list[Findings]:
        """Sends what there is to the host, and starts anew."""
        if self._decodes:
            self._send()
        findings, self._full = self._full, []
        return findings

    def _send(self) -> None:
        used = self._numbers[: len(self._decodes)]
        self._full.append(Findings(self._decodes, self._streams.to_host(used)))
        used.fill_(_NONE)  # after the copy: both are on the side stream
        self._decodes = []
