"""The cuda kernel set: compiled kernels for NVIDIA GPUs, on torch's current stream.

`zcomm._cuda` knows no torch: it takes addresses, sizes and a stream, and launches.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from zcomm.kernels.base import KernelLayout
from zcomm.kernels.device import DeviceMemory, Stream
from zcomm.kernels.device_kernels import DecodeCall, DeviceKernels, EncodeCall
from zcomm.kernels.native import frame_rows, segment_rows


class CudaKernels(DeviceKernels):
    """The kernels of a module: the compiled one, or one that runs them on an emulator.

    The module makes plans of layouts, and launches them; `launcher` may be another who does.
    """

    def __init__(self, module: Any, name: str = "cuda") -> None:
        super().__init__(name)
        self._module = module

    def launcher(self, plan: Any, device: torch.device) -> Any:
        """Whose encode and decode_sum launch the kernels of a plan on a device."""
        return self._module

    def launch_encode(self, layout: KernelLayout, stream: Stream, call: EncodeCall) -> None:
        plan = self._plan(layout, stream.device)
        tables, scratch = plan.tables(stream), plan.encode_scratch(stream)
        plan.launcher.encode(plan.native, tables, scratch, *call, stream.handle)

    def launch_decode_sum(self, layout: KernelLayout, stream: Stream, call: DecodeCall) -> None:
        plan = self._plan(layout, stream.device)
        plan.launcher.decode_sum(
            plan.native,
            plan.tables(stream),
            plan.decode_scratch(stream, len(call.wires)),
            call.wires,
            plan.wire_table(call.wires, self._module.INLINE_WIRES, stream),
            call.out,
            call.verify,
            call.faults,
            stream.handle,
        )

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
