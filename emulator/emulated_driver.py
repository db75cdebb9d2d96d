"""The cupy kernel set on the emulator: NVRTC's PTX, loaded by a driver that runs it there.

Except for the driver and the kind of image, this is what a GPU would use: the wheel's sources,
NVRTC, the cache, and `zcomm._core`'s plans and launches. Translated PTX is cached by its contents.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

import emulated
import ptx_runs
from zcomm import _core
from zcomm.kernels import cuda_driver, nvrtc
from zcomm.kernels.cupy import CupyKernels
from zcomm.kernels.image_cache import CACHE_VARIABLE
from zcomm.kernels.nvrtc import Unit

FOLDER = emulated.CACHE / "driver"
SOURCE = Path(__file__).with_name("emulated_driver.cpp")
INCLUDES = [f"-I{emulated.ROOT / folder}" for folder in ("csrc", "emulator")]
# Kernels are looked up by name, so they stay visible.
FLAGS = [flag for flag in emulated.CXX_FLAGS if flag != "-fvisibility=hidden"]
UNITS = tuple(dict.fromkeys(Unit(file, rows) for _, file, rows in _core.KERNELS))
# The units for codecs without blocks, or with blocks of up to 128 elements.
DEFAULT_UNITS = tuple(unit for unit in UNITS if unit.rows < 2)
os.environ.setdefault(CACHE_VARIABLE, str(emulated.CACHE / "nvrtc"))  # not the user's cache


@cache
def absent() -> str:
    """Why nothing can be compiled here; "" if it can. NVRTC is loaded only on demand."""
    return nvrtc.missing() or nvrtc.missing_library()


@cache
def library() -> Path:
    """The driver. Its file and folder names identify its inputs."""
    stems = ptx_runs.emulator_sources()
    sources = [SOURCE, *stems]
    texts = [path.read_text() for path in (*sources, *sorted(stems[0].parent.glob("*.h")))]
    path = FOLDER / emulated.digest([*FLAGS, *texts]) / "libcuda.so"
    with emulated.locked(path.parent):
        if not path.exists():
            command = [emulated._cxx(), *FLAGS, "-O2", "-shared", *INCLUDES, *map(str, sources)]
            emulated._run([*command, "-ldl", "-o", f"{path}.tmp"])
            os.replace(f"{path}.tmp", path)
    return path


def build(ptx: bytes) -> None:
    """The library that the driver loads for this PTX."""
    text = ptx.rstrip(b"\0").decode()
    path = library().with_name(f"{_fnv1a(text.encode()):016x}.so")
    if path.exists():
        return
    source = path.with_suffix(f".{os.getpid()}.cpp")
    source.write_text(ptx_runs.emit(ptx_runs.parse(text), path.stem))
    command = [emulated._cxx(), *FLAGS, "-Og", "-shared", *INCLUDES]
    emulated._run([*command, str(source), str(library()), "-o", str(source.with_suffix(".so"))])
    os.replace(source.with_suffix(".so"), path)
    source.unlink()


def _fnv1a(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def ptx_of(unit: Unit, arch: int) -> bytes:
    """NVRTC's PTX, through the same cache that users have."""
    return nvrtc.image(unit, f"compute_{arch}")


def kernel_set(name: str, arch: int) -> CupyKernels:
    """The cupy set with PTX for an architecture; its device memory is the CPU's."""

    def images(unit: Unit, device: torch.device) -> bytes:
        ptx = ptx_of(unit, arch)
        build(ptx)
        return ptx

    return CupyKernels(name, cuda_driver.Driver(str(library())), images)


class Lazy:
    """A kernel set that is created on first use."""

    def __init__(self, name: str, arch: int) -> None:
        self.name, self._arch = name, arch
        self._made: CupyKernels | None = None

    def __getattr__(self, attribute: str) -> Any:
        if self._made is None:
            self._made = kernel_set(self.name, self._arch)
        return getattr(self._made, attribute)


def build_all(arch: int, units: tuple[Unit, ...] = UNITS) -> None:
    """Builds units ahead of the tests, two at a time, largest first."""
    library()
    largest_first = sorted(units, key=lambda unit: (-unit.rows, not unit.file.startswith("lm")))
    with ThreadPoolExecutor(2) as pool:
        for ptx in pool.map(lambda unit: ptx_of(unit, arch), largest_first):
            build(ptx)
