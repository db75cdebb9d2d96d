"""The cuda kernel set: compiled kernels for NVIDIA GPUs, on torch's current stream.

`zcomm._cuda` knows no torch: it takes addresses, sizes and a stream, and launches. Calls neither
wait for the device nor allocate, once a layout's tables have been uploaded: its first call on each
device. Scratch memory belongs to a layout and a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zcomm.kernels.base import KernelLayout, KernelMemory, KernelResiduals
from zcomm.kernels.device import NO_FAULT, DeviceMemory, Stream, fault_error, new_faults
from zcomm.kernels.memory import Aligned, AlignedResiduals
from zcomm.kernels.native import GRAD_DTYPES, RESIDUAL_DTYPES, frame_rows, segment_rows

WIRE_ALIGNMENT = 16  # kernels write wires in pieces of up to 16 bytes


class CudaKernels:
    """The kernels of a module: the compiled one, or one that runs them on an emulator.

    The module makes plans of layouts, and launches them; `launcher` may be another who does.
    """

    def __init__(self, module: Any, name: str = "cuda") -> None:
        self.name = name
        self._module = module

    def launcher(self, plan: Any, device: torch.device) -> Any:
        """Whose encode and decode_sum launch the kernels of a plan on a device."""
        return self._module

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
        plan = self._plan(layout, stream.device)
        source, target = Aligned(grad, read=True), Aligned(wire, WIRE_ALIGNMENT)
        held = AlignedResiduals(residuals)
        with stream.device_current():
            plan.launcher.encode(
                plan.native,
                plan.tables(stream),
                plan.encode_scratch(stream),
                source.address,
                GRAD_DTYPES[grad.dtype],
                prescale,
                *held.addresses_on(stream.device),
                RESIDUAL_DTYPES[residuals.dtype] if residuals else 0,
                target.address,
                verify,
                keep_idle,
                stream.handle,
            )
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
        if len(wires) > self._module.MAX_WIRES:
            raise ValueError(
                f"kernels {self.name}: expected at most {self._module.MAX_WIRES} wires, got "
                f"{len(wires)}; use 'reference'"
            )
        stream = Stream(wires[0].device)
        plan = self._plan(layout, stream.device)
        seen = new_faults(stream.device) if faults is None else faults
        aligned = [Aligned(wire, WIRE_ALIGNMENT, read=True) for wire in wires]
        rows = [wire.address for wire in aligned]
        target = Aligned(out)
        with stream.device_current():
            plan.launcher.decode_sum(
                plan.native,
                plan.tables(stream),
                plan.decode_scratch(stream, len(rows)),
                rows,
                plan.wire_table(rows, self._module.INLINE_WIRES, stream),
                target.address,
                verify,
                seen.data_ptr(),
                stream.handle,
            )
        target.write_back((s.offset, s.numel) for s in layout.segments)
        if faults is None and (fault := int(seen.item())) != NO_FAULT:
            raise fault_error(fault, layout)

    def _plan(self, layout: KernelLayout, device: torch.device) -> _Plan:
        key = self.name, device
        found: _Plan | None = layout.device_plans.get(key)
        if found is None:
            native = self._module.Plan(segment_rows(layout), frame_rows(layout))
            found = _Plan(native, self.launcher(native, device))
            layout.device_plans[key] = found
        return found


class _Plan:
    """A layout on a device."""

    def __init__(self, native: Any, launcher: Any) -> None:
        self.native = native
        self.launcher = launcher
        self._table = torch.frombuffer(bytearray(native.tables or bytes(16)), dtype=torch.uint8)
        self._memory = DeviceMemory()

    def tables(self, stream: Stream) -> int:
        return self._memory.table(self._table, stream)

    def encode_scratch(self, stream: Stream) -> int:
        return self._memory.reserved("encode", self.native.encode_scratch_nbytes(), stream)

    def decode_scratch(self, stream: Stream, wires: int) -> int:
        return self._memory.reserved("decode", self.native.decode_scratch_nbytes(wires), stream)

    def wire_table(self, rows: list[int], inline: int, stream: Stream) -> int:
        """The addresses in device memory, where they are too many for a kernel's arguments."""
        return 0 if len(rows) <= inline else self._memory.address_table(rows, stream)


def for_rocm() -> str:
    """Why CUDA is of no use to this torch, whose "cuda" devices are AMD's; "" if it is."""
    return "this torch is for AMD GPUs (ROCm), not for CUDA" if torch.version.hip else ""


@lru_cache(maxsize=1)
def load() -> ModuleType | str:
    """The compiled module, or why there is none."""
    try:
        from zcomm import _cuda
    except ImportError as error:
        return f"zcomm._cuda cannot be imported: {error}; build zcomm where nvcc is"
    return _cuda


def missing() -> str:
    """Why the kernels are absent; "" if they are there."""
    if for_rocm():
        return for_rocm()
    module = load()
    return module if isinstance(module, str) else str(module.missing())


__all__ = [
    "NO_FAULT",
    "CudaKernels",
    "fault_error",
    "for_rocm",
    "load",
    "missing",
    "new_faults",
]
