"""The cuda kernel set: compiled kernels for NVIDIA GPUs, on torch's current stream.

`zcomm._cuda` knows no torch: it takes addresses, sizes and a stream, and launches. Calls neither
wait for the device nor allocate, once a layout's tables have been uploaded: its first call on each
device. Scratch memory belongs to a layout and a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zcomm.kernels.base import KernelLayout, KernelMemory, KernelResiduals
from zcomm.kernels.memory import Aligned, AlignedResiduals, upload
from zcomm.kernels.native import GRAD_DTYPES, RESIDUAL_DTYPES, frame_rows, segment_rows
from zcomm.wire import WireError

WIRE_ALIGNMENT = 16  # kernels write wires in pieces of up to 16 bytes
NO_FAULT = -1


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
        stream = _Stream(wire.device)
        plan = self._plan(layout, stream.device)
        source, target = Aligned(grad, read=True), Aligned(wire, WIRE_ALIGNMENT)
        held = AlignedResiduals(residuals)
        with stream.device_current():
            plan.launcher.encode(
                plan.native,
                plan.tables,
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
        stream = _Stream(wires[0].device)
        plan = self._plan(layout, stream.device)
        seen = new_faults(stream.device) if faults is None else faults
        aligned = [Aligned(wire, WIRE_ALIGNMENT, read=True) for wire in wires]
        rows = [wire.address for wire in aligned]
        target = Aligned(out)
        with stream.device_current():
            plan.launcher.decode_sum(
                plan.native,
                plan.tables,
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
            found = _Plan(native, self.launcher(native, device), device)
            layout.device_plans[key] = found
        return found


class _Plan:
    """A layout on a device: its tables there, scratch memory on the streams that used it."""

    def __init__(self, native: Any, launcher: Any, device: torch.device) -> None:
        self.native = native
        self.launcher = launcher
        data = bytearray(native.tables or bytes(16))
        self._tables = upload(torch.frombuffer(data, dtype=torch.uint8), device)
        self.tables = self._tables.data_ptr()
        self._scratch: dict[tuple[str, int], Tensor] = {}
        self._wire_tables: dict[tuple[int, ...], Tensor] = {}

    def encode_scratch(self, stream: _Stream) -> int:
        return self._reserved("encode", self.native.encode_scratch_nbytes(), stream)

    def decode_scratch(self, stream: _Stream, wires: int) -> int:
        return self._reserved("decode", self.native.decode_scratch_nbytes(wires), stream)

    def _reserved(self, what: str, nbytes: int, stream: _Stream) -> int:
        """Kernels leave it zero. A larger one takes the place of the old one, in stream order."""
        key = what, stream.handle
        found = self._scratch.get(key)
        if found is None or found.numel() < nbytes:
            found = torch.zeros(nbytes, dtype=torch.uint8, device=stream.device)
            self._scratch[key] = found
        return found.data_ptr()

    def wire_table(self, rows: list[int], inline: int, stream: _Stream) -> int:
        """The addresses in device memory, where they are too many for a kernel's arguments."""
        if len(rows) <= inline:
            return 0
        key = tuple(rows)
        found = self._wire_tables.get(key)
        if found is None:
            found = upload(torch.tensor(rows, dtype=torch.int64), stream.device)
            self._wire_tables[key] = found
        return found.data_ptr()


class _Stream:
    """Torch's current stream on a device. Memory of the CPU is the emulator's device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle = 0
        if device.type == "cuda":
            self.handle = torch.cuda.current_stream(device).cuda_stream

    def device_current(self) -> Any:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def new_faults(device: torch.device) -> Tensor:
    """Where kernels leave the least fault that they find."""
    return torch.full((1,), NO_FAULT, dtype=torch.int64, device=device)


# By kind, as csrc/cuda/args.h numbers them: what was expected, and what was found.
_KINDS = (
    ("", ""),
    ("a checksum that fits the bytes", "another"),
    ("a scale that is zero, normal or NaN", "{detail:#x}"),
    ("codes that occur", "one that does not"),
    ("codes 0 under scale {detail:#x}", "others"),
    ("padding 0", "other bytes"),
    ("a topk count within its range", "more"),
    ("all topk counts or none to be flagged", "some"),
    ("topk counts that add up to k", "another total"),
    ("topk offsets that increase within their range", "{detail}"),
    ("a finite topk value that is not -0", "{detail}"),
    ("no topk entries in a segment that is not finite", "some"),
)
_FIELDS = (
    "magic",
    "version",
    "codec",
    "flags",
    "checksum flag",
    "elements",
    "frame bytes",
    "layout",
    "checksum field",
)


def fault_error(value: int, layout: KernelLayout) -> WireError:
    """The error of a fault: stage (2 bits), wire (14), segment or frame (24), kind (8), detail."""
    value &= (1 << 64) - 1
    wire, index = value >> 48 & 0x3FFF, value >> 24 & 0xFFFFFF
    kind, detail = value >> 16 & 0xFF, value & 0xFFFF
    if kind <= 1:
        where = f"wire {wire}" + (f", frame {index}" if len(layout.frames) > 1 else "")
    else:
        where = f"wire {wire}, segment {index} ({layout.segments[index].codec.spec})"
    expected, got = _KINDS[kind] if kind else (f"the layout's {_FIELDS[detail]}", "another")
    text = f"expected {expected}, got {got}".format(detail=detail)
    return WireError(f"{where}: {text}", wire)


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
