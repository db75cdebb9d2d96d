"""What every kernel set of devices does around its launches, on torch's current stream.

Calls neither wait for the device nor allocate, but for a layout's first one on a stream, those with
more wires than before, and decodes that are to raise what they find. Tables and scratch memory
belong to a layout and a stream.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from zcomm.kernels.base import KernelLayout, KernelMemory, KernelResiduals
from zcomm.kernels.device import NO_FAULT, Stream, fault_error, new_faults
from zcomm.kernels.memory import Aligned, AlignedResiduals
from zcomm.kernels.native import GRAD_DTYPES, RESIDUAL_DTYPES

MAX_WIRES = 4096  # of one decode_sum
WIRE_ALIGNMENT = 16  # kernels write wires in pieces of up to 16 bytes


class EncodeCall(NamedTuple):
    """The memory of an encode by its addresses, and how to treat it: as launchers take it."""

    grad: int
    grad_dtype: int
    prescale: float
    residual_inputs: int  # tables of addresses; 0 without residuals
    residual_outputs: int
    residual_dtype: int
    wire: int
    verify: bool
    keep_idle: bool


class DecodeCall(NamedTuple):
    """The same of a decode_sum."""

    wires: list[int]
    out: int
    verify: bool
    faults: int


class DeviceKernels(ABC):
    """A set launches; here is what comes before and after: alignment, devices, faults."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Two threads on one stream may have the same layout: its scratch memory is for one call.
        self._launching = threading.Lock()

    @abstractmethod
    def launch_encode(self, layout: KernelLayout, stream: Stream, call: EncodeCall) -> None:
        """Starts the kernels. The stream's device is current, and no other call launches."""

    @abstractmethod
    def launch_decode_sum(self, layout: KernelLayout, stream: Stream, call: DecodeCall) -> None:
        """The same for a decode_sum."""

    def encode(
        self,
        layout: KernelLayout,
        grad: KernelMemory,
        residuals: KernelResiduals | None,
        wire: Tensor,
        prescale: float,
        verify: bool,
        threads: int | None,
        keep_idle: bool = False,
    ) -> None:
        stream = Stream(wire.device)
        source, target = Aligned(grad, read=True), Aligned(wire, WIRE_ALIGNMENT)
        held = AlignedResiduals(residuals)
        with self._launching, stream.device_current():
            call = EncodeCall(
                source.address,
                GRAD_DTYPES[grad.dtype],
                prescale,
                *held.addresses_on(stream.device),
                RESIDUAL_DTYPES[residuals.dtype] if residuals else 0,
                target.address,
                verify,
                keep_idle,
            )
            self.launch_encode(layout, stream, call)
        target.write_back()
        held.write_back()

    def decode_sum(
        self,
        layout: KernelLayout,
        wires: Sequence[Tensor],
        out: KernelMemory,
        verify: bool,
        threads: int | None,
        faults: Tensor | None = None,
    ) -> None:
        """With `faults` a refused wire lowers its value; without, the device is waited for."""
        if len(wires) > MAX_WIRES:
            raise ValueError(
                f"kernels {self.name}: expected at most {MAX_WIRES} wires, got {len(wires)}; "
                "use 'reference'"
            )
        stream = Stream(wires[0].device)
        seen = new_faults(stream.device) if faults is None else faults
        aligned = [Aligned(wire, WIRE_ALIGNMENT, read=True) for wire in wires]
        target = Aligned(out)
        with self._launching, stream.device_current():
            rows = [wire.address for wire in aligned]
            call = DecodeCall(rows, target.address, verify, seen.data_ptr())
            self.launch_decode_sum(layout, stream, call)
        target.write_back((s.offset, s.numel) for s in layout.segments)
        if faults is None and (fault := int(seen.item())) != NO_FAULT:
            raise fault_error(fault, layout)
