"""What every device kernel set does around its launches, on torch's current stream.

Calls neither wait for the device nor allocate, with three exceptions: a layout's first call on a
stream, a call with more wires than before, and a decode that must raise the faults it finds. Tables
and scratch memory belong to one layout and one stream.
"""

import threading
from abc import ABC, abstractmethod
from typing import NamedTuple

from zcomm.kernels import base
from zcomm.kernels.base import DecodeCall, EncodeCall, KernelLayout
from zcomm.kernels.device import NO_FAULT, Stream, fault_error, new_faults
from zcomm.kernels.memory import Aligned, AlignedResiduals

MAX_WIRES = 4096  # in one decode_sum
WIRE_ALIGNMENT = 16  # kernels write wires in pieces of up to 16 bytes


class EncodeLaunch(NamedTuple):
    """An EncodeCall as addresses and numbers, in launcher argument order."""

    grad: int
    grad_dtype: int
    prescale: float
    residual_inputs: int  # address tables; 0 without residuals
    residual_outputs: int
    residual_dtype: int
    wire: int
    verify: bool
    keep_idle: bool


class DecodeLaunch(NamedTuple):
    """The same for a DecodeCall."""

    wires: list[int]
    out: int
    verify: bool
    faults: int


class DeviceKernels(ABC):
    """Handles alignment, devices and faults; subclasses launch the kernels."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Two threads may use a layout on one stream, but its scratch memory serves one call.
        self._launching = threading.Lock()

    @abstractmethod
    def launch_encode(self, layout: KernelLayout, stream: Stream, launch: EncodeLaunch) -> None:
        """Launches the kernels. The stream's device is current; no other call is launching."""

    @abstractmethod
    def launch_decode_sum(self, layout: KernelLayout, stream: Stream, launch: DecodeLaunch) -> None:
        """The same for a decode_sum."""

    def encode(self, layout: KernelLayout, call: EncodeCall) -> None:
        stream = Stream(call.wire.device)
        source, target = Aligned(call.grad, read=True), Aligned(call.wire, WIRE_ALIGNMENT)
        held = AlignedResiduals(call.residuals)
        with self._launching, stream.device_current():
            launch = EncodeLaunch(
                source.address,
                base.GRAD_DTYPES[call.grad.dtype],
                call.prescale,
                *held.addresses_on(stream.device),
                base.RESIDUAL_DTYPES[call.residuals.dtype] if call.residuals else 0,
                target.address,
                call.verify,
                call.keep_idle,
            )
            self.launch_encode(layout, stream, launch)
        target.write_back()
        held.write_back()

    def decode_sum(self, layout: KernelLayout, call: DecodeCall) -> None:
        """A refused wire lowers `faults` if given; otherwise this waits for the device."""
        wires = call.wires
        if len(wires) > MAX_WIRES:
            raise ValueError(
                f"kernels {self.name}: expected at most {MAX_WIRES} wires, got {len(wires)}; "
                "use 'reference'"
            )
        stream = Stream(wires[0].device)
        seen = new_faults(stream.device) if call.faults is None else call.faults
        aligned = [Aligned(wire, WIRE_ALIGNMENT, read=True) for wire in wires]
        target = Aligned(call.out)
        with self._launching, stream.device_current():
            rows = [wire.address for wire in aligned]
            launch = DecodeLaunch(rows, target.address, call.verify, seen.data_ptr())
            self.launch_decode_sum(layout, stream, launch)
        target.write_back((s.offset, s.numel) for s in layout.segments)
        if call.faults is None and (fault := int(seen.item())) != NO_FAULT:
            raise fault_error(fault, layout)
