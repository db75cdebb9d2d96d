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

    segments: tuple[Segment, ...]
    body_starts: tuple[int, ...]
    frames: tuple[Frame, ...]
    wire_nbytes: int
    numel: int
    span: int
    native: Any
    device_plans: dict[object, Any]


class KernelResiduals(Protocol):
    """Residuals: one tensor (or None) per segment, and the tables of their addresses."""

    dtype: torch.dtype
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor | None, ...]
    in_addresses: int
    out_addresses: int

    @property
    def address_bits(self) -> int:
        """All addresses ORed together, which shows their common alignment."""
        ...

    def addresses_on(self, device: torch.device) -> tuple[int, int]:
        """The addresses of the two tables' copies in device memory."""
        ...


class KernelMemory(Protocol):
    """A flat tensor, or an object with its address and slices."""

    dtype: torch.dtype
    device: torch.device

    def data_ptr(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Tensor: ...


# How compiled code numbers dtypes, and the row it takes for a segment:
# codec, log2 of the block, elements, k, offset, frame, body
GRAD_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
RESIDUAL_DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 3}
SegmentRow = tuple[int, int, int, int, int, int, int]


def segment_rows(layout: KernelLayout) -> list[SegmentRow]:
    return [
        (s.codec.id, s.codec.log2_block, s.numel, s.codec.k(s.numel), s.offset, s.peer, start)
        for s, start in zip(layout.segments, layout.body_starts)
    ]


# Why native code refused a wire: the wire, the message, and the frame or segment at fault.
Fault = tuple[int, str, int | None, int | None]


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
    """What a decode_sum reads, what it overwrites (the segments' elements of `out`), and how.

    With `apart` the wires are the frames of one wire, which lie apart in memory. Only kernel sets
    of the CPU are asked for that.
    """

    wires: Sequence[Tensor]
    out: KernelMemory
    verify: bool = True
    threads: int | None = None
    faults: Tensor | None = None
    apart: bool = False


class KernelSet(Protocol):
    """The primitives, over all segments of a layout. Arguments are already checked."""

    name: str

    def encode(self, layout: KernelLayout, call: EncodeCall) -> None: ...
    def decode_sum(self, layout: KernelLayout, call: DecodeCall) -> None:
        """Raises a WireError for a refused wire.

        Given `call.faults`, an asynchronous kernel set stores the fault there instead of waiting
        for the device.
        """
        ...
