"""Kernel sets: each encodes and decodes all segments of a layout in one call.

`reference` is plain torch. `cpu` is compiled and uses the fastest ISA here, or ZCOMM_CPU_ISA's;
cpu:scalar, cpu:avx2 and cpu:avx512 name one. `cuda` is compiled for NVIDIA GPUs, `cupy` compiles
the same kernels on first use, `triton` is for NVIDIA, AMD and Intel GPUs. By default, CPU tensors
use `cpu`; GPU tensors use the first available of `cuda`, `cupy` and `triton`, or else `reference`,
with a warning because it is slow. ZCOMM_KERNELS changes the default; it is read at first use on
each device. If `cpu` or a set requested by name is unavailable, the call raises the reason.

Imports: wire, base and torch_private. Start with base.py, then reference.py.
"""

import importlib
import os
import warnings
from functools import lru_cache
from typing import Any

import torch

from zcomm.kernels import cpu, cuda
from zcomm.kernels.base import KernelSet
from zcomm.kernels.reference import ReferenceKernels

KERNELS_VARIABLE = "ZCOMM_KERNELS"
# Kernel sets for GPUs in order of preference, and the device types they support. ROCm builds of
# torch call AMD GPUs "cuda" too; there, cuda and cupy are unavailable.
ON_GPUS = {"cuda": ("cuda",), "cupy": ("cuda",), "triton": ("cuda", "xpu")}
NAMES = ("reference", "cpu", *(f"cpu:{isa}" for isa in cpu.ISAS), *ON_GPUS)
_registered: dict[str, KernelSet] = {}


def select(device: torch.device, name: str | None = None) -> KernelSet:
    """The kernel set with this name, or the default for tensors on `device`."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"kernels: expected one of {', '.join(NAMES)}, got {type(name).__name__}")
    return _select(device, name)


def available() -> dict[str, str]:
    """Why each kernel set is unavailable ("" if it is available), by name; for GPUs, on the first.

    On a machine with a GPU this initializes CUDA, which does not survive a fork: spawn ranks.
    """
    return {name: _missing(name) for name in NAMES}


def default(device_type: str, ordinal: int = 0) -> str:
    """The name of the set that a device's tensors use by default."""
    if device_type == "cpu":
        return "cpu"
    fitting = _fitting(device_type)
    return next((name for name in fitting if not _missing(name, ordinal)), "reference")


def forced() -> str | None:
    """The set that ZCOMM_KERNELS makes the default, if any."""
    return os.environ.get(KERNELS_VARIABLE) or None


@lru_cache(maxsize=64)
def _select(device: torch.device, name: str | None) -> KernelSet:
    if device.type == "meta":
        raise ValueError("expected tensors that hold data, got meta tensors")
    source = KERNELS_VARIABLE if name is None else "kernels"
    name = forced() if name is None else name
    if name is None:
        name = default(device.type, device.index or 0)
        if name == "reference":
            _warn_of_reference(device.type, absences(device.type, device.index or 0))
    if name in _registered:
        return _registered[name]
    if name not in NAMES:
        raise ValueError(f"{source}: expected one of {', '.join(NAMES)}, got {name!r}")
    return _made(name, device, source)


def _made(name: str, device: torch.device, source: str) -> KernelSet:
    if name == "reference":
        return ReferenceKernels()
    needed = ON_GPUS.get(name, ("cpu",))
    if device.type not in needed:
        remedy = f"unset {source}" if source == KERNELS_VARIABLE else "use 'reference'"
        raise ValueError(
            f"kernels {name}: expected tensors on {' or '.join(needed)}, got {device.type}; "
            f"{remedy}"
        )
    isa = "" if name in ON_GPUS else _isa(name)
    reason = cpu.missing(isa) if isa else _missing(name, device.index or 0)
    if reason:
        raise RuntimeError(f"kernels {name} are absent: {reason}")
    return cpu.CpuKernels(isa) if isa else _made_for_gpus(name)


def _made_for_gpus(name: str) -> KernelSet:
    """The only place that imports CuPy or Triton."""
    if name == "cuda":
        return cuda.CudaKernels(cuda.load())
    made: KernelSet = getattr(_module(name), f"{name.capitalize()}Kernels")()
    return made


def register(name: str, kernel_set: KernelSet) -> None:
    """Adds an external kernel set, such as an emulated GPU's, for tensors on any device."""
    _registered[name] = kernel_set
    _select.cache_clear()


def absences(device_type: str, ordinal: int = 0) -> str:
    """Why each kernel set for this type of GPU is unavailable."""
    return "; ".join(f"{name}: {_missing(name, ordinal)}" for name in _fitting(device_type))


def _fitting(device_type: str) -> list[str]:
    return [name for name, types in ON_GPUS.items() if device_type in types]


@lru_cache(maxsize=8)
def _warn_of_reference(device_type: str, reasons: str) -> None:
    warnings.warn(
        f"zcomm: no kernels for tensors on {device_type}, so they go through plain torch, which "
        f"is much slower. {reasons or 'No kernel set takes such tensors'}. If this is meant, set "
        f"{KERNELS_VARIABLE}=reference",
        stacklevel=2,
    )


def _isa(name: str) -> str:
    return cpu.chosen_isa() if name == "cpu" else name.removeprefix("cpu:")


def _module(name: str) -> Any:
    return importlib.import_module(f"zcomm.kernels.{name}")


def _missing(name: str, ordinal: int = 0) -> str:
    if name == "reference":
        return ""
    if name in ON_GPUS:
        return _missing_on_gpus(name, ordinal)
    try:
        return cpu.missing(_isa(name))
    except ValueError as error:  # ZCOMM_CPU_ISA names no ISA
        return str(error)


def _missing_on_gpus(name: str, ordinal: int) -> str:
    try:
        return str(_module(name).missing(ordinal))
    except ImportError as error:
        return f"zcomm.kernels.{name} cannot be imported: {error}"
