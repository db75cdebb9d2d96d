"""PTX on the emulator: translates it, compiles the result, and calls its kernels with ctypes."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRANSLATOR = HERE / "ptx_to_cpp.py"
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))

from ptx.emit import emit  # noqa: E402
from ptx.source import PtxError as PtxError  # noqa: E402
from ptx.source import parse  # noqa: E402

CSRC = HERE.parent / "csrc"
EMULATOR = ("c_api", "simt", "cta", "fiber", "stall", "traffic")
FLAGS = (
    "-std=c++17",
    "-O1",
    "-w",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-pthread",
)


class KernelError(Exception):
    """An emu::Error."""


@dataclass
class Library:
    """Callable kernels. `traffic` has the bytes that the last call loaded and stored."""

    dll: ctypes.CDLL
    traffic: tuple[int, int] = (0, 0)

    def __call__(self, name: str, args: ctypes.Structure | bytes, *, ctas=1, threads=1, shared=0):
        kernel = ctypes.cast(getattr(self.dll, name), ctypes.c_void_p)
        error, grid = ctypes.create_string_buffer(500), (ctypes.c_uint * 3)(ctas, 1, 1)
        moved = (ctypes.c_uint64 * 3)()
        at = ctypes.byref(args) if isinstance(args, ctypes.Structure) else args
        self.dll.emulator_count_sectors(1)
        if self.dll.emulator_launch(kernel, grid, threads, shared, at, error, 500):
            raise KernelError(error.value.decode())
        self.dll.emulator_traffic(moved)
        self.traffic = (moved[0], moved[1])


def emulator_sources() -> list[Path]:
    """The sources that every library includes."""
    return [HERE / "simt" / f"{stem}.cpp" for stem in EMULATOR]


def compile_objects(sources: Sequence[Path], folder: Path, *options: str) -> list[Path]:
    """Compiles two files at a time; treats .cu files as C++."""

    def compiled(source: Path) -> Path:
        out = folder / f"{source.stem}.o"
        language = ("-x", "c++") if source.suffix == ".cu" else ()
        command = [
            "g++",
            *FLAGS,
            f"-I{CSRC}",
            f"-I{HERE}",
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
