"""The interface of a kernel set, and the parts of layouts and residuals that it uses.

Codecs import kernels, not the reverse, so protocols stand in for their classes here.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zcomm.wire.header import Frame, WireError
from zcomm.wire.segments import Segment


class KernelLayout(Protocol):
    """A layout. Kernel sets cache their own forms of it in `native` and `device_plans`."""

    native: Any
    device_plans: dict[object, Any]

    @property
    def segments(self) -> Sequence[Segment]: ...
    @property
    def body_starts(self) -> Sequence[int]: ...
    @property
    def frames(self) -> Sequence[Frame]: ...
    @property
    def wire_nbytes(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def span(self) -> int: ...


class KernelResiduals(Protocol):
    """Residuals: one tensor (or None) per segment, and the tables of their addresses."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def inputs(self) -> Sequence[Tensor | None]: ...
    @property
    def outputs(self) -> Sequence[Tensor | None]: ...
    @property
    def in_addresses(self) -> int: ...
    @property
    def out_addresses(self) -> int: ...
    @property
    def address_bits(self) -> int:
        """All addresses ORed together, which shows their common alignment."""
        ...

    def addresses_on(self, device: torch.device) -> tuple[int, int]:
        """The addresses of the two tables' copies in device memory."""
        ...


class KernelMemory(Protocol):
    """A flat tensor, or an object with its address and slices."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def data_ptr(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Tensor: ...


def wire_error(
    layout: KernelLayout, wire: int, text: str, frame: int | None = None, segment: int | None = None
) -> WireError:
    """The error for a refused wire: its place ("wire 1, frame 2"), then the text."""
    place = f"wire {wire}"
    if frame is not None and len(layout.frames) > 1:
        place += f", frame {frame}"
    if segment is not None:
        place += f", segment {segment} ({layout.segments[segment].codec.spec})"
    return WireError(f"{place}: {text}", wire, frame, segment)


class EncodeCall(NamedTuple):
    """What an encode reads, what it overwrites (`wire`, the residuals' outputs), and how."""

    grad: KernelMemory
    residuals: KernelResiduals | None
    wire: Tensor
    prescale: float = 1.0
    verify: bool = True
    threads: int | None = None
    keep_idle: bool = False  # see Layout.encode


class DecodeCall(NamedTuple):
    """What a decode_sum reads, what it overwrites (the segments' elements of `out`), and how."""

    wires: Sequence[Tensor]
    out: KernelMemory
    verify: bool = True
    threads: int | None = None
    faults: Tensor | None = None


class KernelSet(Protocol):
    """The primitives, over all segments of a layout. Arguments are already checked."""

    @property
    def name(self) -> str: ...
    def encode(self, layout: KernelLayout, call: EncodeCall) -> None: ...
    def decode_sum(self, layout: KernelLayout, call: DecodeCall) -> None:
        """Raises a WireError for a refused wire.

        Given `call.faults`, an asynchronous kernel set stores the fault there instead of waiting
        for the device.
        """
        ...
