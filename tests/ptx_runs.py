"""PTX on the emulator: translates it, compiles the result, and calls its kernels by ctypes."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRANSLATOR = ROOT / "tools" / "ptx_to_cpp.py"
if str(TRANSLATOR.parent) not in sys.path:
    sys.path.append(str(TRANSLATOR.parent))

from ptx.emit import emit  # noqa: E402
from ptx.source import PtxError as PtxError  # noqa: E402
from ptx.source import parse  # noqa: E402

CSRC = ROOT / "csrc"
EMULATOR = ("simt", "cta", "fiber", "stall", "traffic")
FLAGS = (
    "-std=c++17",
    "-O1",
    "-w",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-pthread",
)

RUN = r"""
#include <cstdio>
#include "emulator/simt.h"
extern "C" int run(emu::Kernel kernel, unsigned ctas, unsigned threads, unsigned shared,
                   const void* args, char* error, unsigned error_nbytes, unsigned long* traffic) {
  emu::settings().count_sectors = true;
  emu::reset_traffic();
  try {
    emu::launch(kernel, {ctas, 1, 1}, {threads, 1, 1}, shared, args);
  } catch (const emu::Error& e) {
    std::snprintf(error, error_nbytes, "%s", e.what());
    return 1;
  }
  traffic[0] = emu::traffic().loaded;
  traffic[1] = emu::traffic().stored;
  return 0;
}
"""


class KernelError(Exception):
    """An emu::Error."""


@dataclass
class Library:
    """Kernels that can be called. `traffic` has the bytes that the last one loaded and stored."""

    dll: ctypes.CDLL
    traffic: tuple[int, int] = (0, 0)

    def __call__(self, name: str, args: ctypes.Structure | bytes, *, ctas=1, threads=1, shared=0):
        kernel = ctypes.cast(getattr(self.dll, name), ctypes.c_void_p)
        error = ctypes.create_string_buffer(500)
        traffic = (ctypes.c_ulong * 2)()
        at = ctypes.byref(args) if isinstance(args, ctypes.Structure) else args
        if self.dll.run(kernel, ctas, threads, shared, at, error, 500, traffic):
            raise KernelError(error.value.decode())
        self.traffic = (traffic[0], traffic[1])


def emulator_sources(folder: Path) -> list[Path]:
    """The emulator, and `run`, which every library has."""
    (folder / "run.cpp").write_text(RUN)
    return [folder / "run.cpp", *(CSRC / "emulator" / f"{stem}.cpp" for stem in EMULATOR)]


def compile_objects(sources: Sequence[Path], folder: Path, *options: str) -> list[Path]:
    """Two at a time; .cu files as C++."""

    def compiled(source: Path) -> Path:
        out = folder / f"{source.stem}.o"
        language = ("-x", "c++") if source.suffix == ".cu" else ()
        command = [
            "g++",
            *FLAGS,
            f"-I{CSRC}",
            *options,
            *language,
            "-c",
            str(source),
            "-o",
            str(out),
        ]
        subprocess.run(command, check=True)
        return out

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compiled, sources))


def translate(ptx: Path) -> Path:
    """The C++ of a PTX file, or a PtxError."""
    out = ptx.with_suffix(".cpp")
    out.write_text(emit(parse(ptx.read_text()), ptx.name))
    return out


def link(objects: Sequence[Path], out: Path) -> Library:
    subprocess.run(["g++", "-shared", "-pthread", *map(str, objects), "-o", str(out)], check=True)
    return Library(ctypes.CDLL(str(out)))
