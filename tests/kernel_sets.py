"""The kernel sets that this machine has; tests run over all of them.

The CUDA kernels are among them on a machine without a GPU: their PTX, as nvcc makes it for the
architectures of ZCOMM_EMULATED ("ptx80"; "source" is the source itself), runs on the emulator. So
does the PTX that NVRTC makes for the cupy set ("nvrtc80").
"""

from __future__ import annotations

import os
from typing import Any

import pytest

import emulated
import emulated_driver
import zcomm
from zcomm import kernels
from zcomm.kernels.cuda import CudaKernels

_PRESENT = [name for name, reason in zcomm.available_kernels().items() if not reason]
# "cpu" is one of the cpu:<isa> sets under another name; the others take tensors on GPUs only.
KERNEL_SETS = [name for name in _PRESENT if name not in ("cpu", "cuda", "cupy", "triton")]
# Without the compiled sets the tests would compare the reference with itself.
assert "cpu:scalar" in KERNEL_SETS, zcomm.available_kernels()


class _Lazy:
    """The emulated module, built when it is first used."""

    def __init__(self, build: emulated.Build) -> None:
        self._build = build

    def __getattr__(self, name: str) -> Any:
        return getattr(emulated.load(self._build), name)


def _register(kind: str) -> str:
    if kind.startswith("nvrtc"):
        name = f"cupy:{kind}"
        kernels.register(name, emulated_driver.Lazy(name, int(kind.removeprefix("nvrtc"))))
        return name
    arch = 0 if kind == "source" else int(kind.removeprefix("ptx"))
    kernels.register(f"cuda:{kind}", CudaKernels(_Lazy(emulated.Build(arch)), f"cuda:{kind}"))
    return f"cuda:{kind}"


def _absent(kind: str) -> str:
    """Why kernels of this kind cannot be built; "" if they can."""
    if kind.startswith("nvrtc"):
        return emulated_driver.absent()
    return "" if kind == "source" or emulated.NVCC else emulated.NO_NVCC


_KINDS = [kind for kind in os.environ.get("ZCOMM_EMULATED", "ptx80").split(",") if kind]
_HERE = [kind for kind in _KINDS if not _absent(kind)]
EMULATED = [_register(kind) for kind in _HERE]
# All of them, for parametrize: what cannot be built is skipped, and the summary says why.
CONTRACT_SETS = [
    *KERNEL_SETS,
    *EMULATED,
    *(
        pytest.param(kind, marks=pytest.mark.skip(reason=_absent(kind)))
        for kind in _KINDS
        if kind not in _HERE
    ),
]
COMPILED = [name for name in (*KERNEL_SETS, *EMULATED) if name != "reference"]

SPECS = [
    "none",
    "bf16",
    "fp16",
    "int8",
    "fp8",
    "int4",
    "lm4",
    "lm3",
    "lm2",
    "sign",
    "topk:0.1",
    "int4:block=32",
    "lm3:block=1024",
]
