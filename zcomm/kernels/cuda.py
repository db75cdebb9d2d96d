"""The cuda kernel set: compiled kernels for NVIDIA GPUs, on torch's current stream.

`zcomm._cuda` does not depend on torch: it takes addresses, sizes and a stream, and launches.
"""

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from zcomm.kernels.base import KernelLayout, segment_rows
from zcomm.kernels.device import DeviceMemory, Stream
from zcomm.kernels.device_kernels import DecodeLaunch, DeviceKernels, EncodeLaunch


class _DeviceLayout:
    """A layout on a device."""

    def __init__(self, native: Any, launcher: Any) -> None:
        self.native = native
        self.launcher = launcher
        self.table = torch.frombuffer(bytearray(native.tables or bytes(16)), dtype=torch.uint8)
        self.memory = DeviceMemory()


class CudaKernels(DeviceKernels):
    """The kernels of a module: the compiled one, or one that runs them on an emulator.

    The module makes a plan for each layout. It launches plans too, unless `launcher` is overridden.
    """

    def __init__(self, module: Any, name: str = "cuda") -> None:
        super().__init__(name)
        self._module = module

    def launcher(self, plan: Any, device: torch.device) -> Any:
        """The object whose encode and decode_sum launch a plan's kernels on a device."""
        return self._module

    def launch_encode(self, layout: KernelLayout, stream: Stream, launch: EncodeLaunch) -> None:
        plan = self._plan(layout, stream.device)
        memory = plan.memory.on(stream)
        scratch = memory.reserved("encode", plan.native.encode_scratch_nbytes())
        tables = memory.table(plan.table)
        plan.launcher.encode(plan.native, tables, scratch, *launch, stream.handle)

    def launch_decode_sum(self, layout: KernelLayout, stream: Stream, launch: DecodeLaunch) -> None:
        plan = self._plan(layout, stream.device)
        memory, wires = plan.memory.on(stream), len(launch.wires)
        # Too many addresses to pass as kernel arguments.
        many = wires > self._module.INLINE_WIRES
        plan.launcher.decode_sum(
            plan.native,
            memory.table(plan.table),
            memory.reserved("decode", plan.native.decode_scratch_nbytes(wires)),
            launch.wires,
            memory.address_table(launch.wires) if many else 0,
            launch.out,
            launch.verify,
            launch.faults,
            stream.handle,
        )

    def _plan(self, layout: KernelLayout, device: torch.device) -> _DeviceLayout:
        key = self.name, device
        found: _DeviceLayout | None = layout.device_plans.get(key)
        if found is None:
            native = self._module.Plan(segment_rows(layout), layout.frames)
            found = _DeviceLayout(native, self.launcher(native, device))
            layout.device_plans[key] = found
        return found


def for_rocm() -> str:
    """Why CUDA kernels cannot run if this torch's "cuda" devices are AMD GPUs; otherwise ""."""
    return "this torch is for AMD GPUs (ROCm), not for CUDA" if torch.version.hip else ""


def without_cuda() -> str:
    """Why this torch has no tensors for CUDA kernels; "" if it does."""
    if torch.version.cuda is None:
        return f"torch was built without CUDA ({torch.__version__}); install a CUDA build of it"
    return ""


@lru_cache(maxsize=1)
def load() -> ModuleType | str:
    """The compiled module, or why it cannot be loaded."""
    try:
        from zcomm import _cuda
    except ImportError as error:
        return f"zcomm._cuda cannot be imported: {error}; build zcomm where nvcc is"
    return _cuda


def missing(ordinal: int = 0) -> str:
    """Why a device cannot run the kernels; "" if it can. Checks the driver first."""
    if for_rocm():
        return for_rocm()
    module = load()
    if isinstance(module, str):
        return module
    return str(module.missing()) or _no_code(module, ordinal) or without_cuda()


def _no_code(module: ModuleType, ordinal: int) -> str:
    try:
        return no_code(module.capability(ordinal), module.ARCHS)
    except RuntimeError as error:  # no device with this number
        return str(error)


def no_code(capability: tuple[int, int], archs: Sequence[int]) -> str:
    """Why machine code for `archs`, plus PTX for the last, cannot run on a device; "" if it can."""
    major, arch = capability[0], 10 * capability[0] + capability[1]
    if arch >= archs[-1] or any(known // 10 == major and known <= arch for known in archs):
        return ""
    built = ", ".join(f"{known // 10}.{known % 10}" for known in archs)
    return (
        f"zcomm._cuda was built for compute capability {built}, and this GPU has {major}."
        f"{capability[1]}; build it with ZCOMM_CUDA_ARCHS={arch}, or use CuPy or Triton"
    )
