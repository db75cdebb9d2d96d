"""The choice between kernel sets.

| name                              | what it is                                               |
| --------------------------------- | -------------------------------------------------------- |
| reference                         | plain torch, any device                                  |
| cpu                               | compiled, the fastest ISA here, or the one of ZCOMM_CPU_ISA |
| cpu:scalar, cpu:avx2, cpu:avx512  | compiled, that ISA                                       |
| cuda                              | compiled, for tensors on NVIDIA GPUs                     |

Tensors on the CPU use `cpu`, those on CUDA devices `cuda`, others `reference`. ZCOMM_KERNELS names
another set for all calls that name none. Both variables are read once, at the first use. There is
no silent fallback: a set that is absent raises its reason.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from zcomm.kernels import cpu, cuda
from zcomm.kernels.base import KernelSet
from zcomm.kernels.reference import ReferenceKernels

KERNELS_VARIABLE = "ZCOMM_KERNELS"
NAMES = ("reference", "cpu", *(f"cpu:{isa}" for isa in cpu.ISAS), "cuda")
_registered: dict[str, KernelSet] = {}


def select(device: torch.device, name: str | None = None) -> KernelSet:
    """The kernel set of this name, or the default one for tensors on `device`."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"kernels: expected one of {', '.join(NAMES)}, got {type(name).__name__}")
    return _select(device, name)


def available() -> dict[str, str]:
    """Every kernel set's name, and why it is absent ("" if it is there)."""
    return {name: _missing(name) for name in NAMES}


@lru_cache(maxsize=64)
def _select(device: torch.device, name: str | None) -> KernelSet:
    device_type = device.type
    if device_type == "meta":
        raise ValueError("expected tensors that hold data, got meta tensors")
    source = "kernels"
    if name is None:
        forced = os.environ.get(KERNELS_VARIABLE)
        source, name = KERNELS_VARIABLE, forced or _default(device_type)
    if name in _registered:
        return _registered[name]
    if name not in NAMES:
        raise ValueError(f"{source}: expected one of {', '.join(NAMES)}, got {name!r}")
    if name == "reference":
        return ReferenceKernels()
    needed = "cuda" if name == "cuda" else "cpu"
    if device_type != needed:
        raise ValueError(
            f"kernels {name}: expected tensors on {needed}, got {device_type}; use 'reference'"
        )
    isa = "" if name == "cuda" else _isa(name)
    reason = cpu.missing(isa) if isa else cuda.missing()
    if reason:
        raise RuntimeError(f"kernels {name} are absent: {reason}")
    return cpu.CpuKernels(isa) if isa else cuda.CudaKernels(cuda.load())


def register(name: str, kernel_set: KernelSet) -> None:
    """Adds a kernel set that comes from elsewhere, for tensors on any device: an emulated GPU."""
    _registered[name] = kernel_set
    _select.cache_clear()


def _default(device_type: str) -> str:
    return device_type if device_type in ("cpu", "cuda") else "reference"


def _isa(name: str) -> str:
    return cpu.chosen_isa() if name == "cpu" else name.removeprefix("cpu:")


def _missing(name: str) -> str:
    if name == "reference":
        return ""
    if name == "cuda":
        return cuda.missing()
    try:
        return cpu.missing(_isa(name))
    except ValueError as error:  # ZCOMM_CPU_ISA names no ISA
        return str(error)


__all__ = ["NAMES", "KernelSet", "available", "register", "select"]
