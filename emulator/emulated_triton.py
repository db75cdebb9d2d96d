"""Triton kernels on the emulator: Triton's PTX, translated to C++ and loaded.

Each variant is a separate shared library; another one is the emulator. They are cached in
build/emulated, under a hash of their inputs.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import emulated
from triton_compiler import Compiled, Request, Target, compile_variants

COMPILER = Path(__file__).with_name("triton_compiler.py")
ERROR_NBYTES = 1000
# Triton adds two scratch memory addresses to every kernel; ours do not use them.
SCRATCH_NBYTES = 16
FORMATS = {"i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f", "fp64": "d"}
NO_TRITON = "triton not found: its kernels are not compiled"
FOUND = importlib.util.find_spec("triton") is not None


class KernelError(RuntimeError):
    """The emulator refused an address outside memory, or a barrier that not all threads reach."""


@dataclass(frozen=True)
class Kernels:
    """The variants of a registry (see triton_compiler.Request) for one target.

    `sources` are the files whose text determines what is compiled.
    """

    registry: str
    target: Target
    sources: tuple[Path, ...]
    path: tuple[str, ...] = ()
    options: tuple[tuple[str, object], ...] = ()
    assembled: bool = False
    cache: Path = emulated.CACHE

    def build(self, names: Iterable[str]) -> None:
        """Builds everything that load() needs, on all processors."""
        emulator()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.library, self.compiled(names)))

    def compiled(self, names: Iterable[str]) -> list[Compiled]:
        """Triton's output for the variants; compiles each at most once."""
        names = list(names)
        missing = [name for name in names if not self._row(name).exists()]
        if missing:
            self._compile(missing)
        return [Compiled(**json.loads(self._row(name).read_text())) for name in names]

    def _compile(self, names: Sequence[str]) -> None:
        """Compiles with one process per processor."""
        self.cache.mkdir(parents=True, exist_ok=True)
        # Rows are named by the sources as of now: a change during compilation gives a new row.
        rows_at = {name: self._row(name) for name in names}
        workers = min(os.cpu_count() or 1, len(names))
        place, options = (str(self.cache), self.path), dict(self.options)
        requests = [
            Request(self.registry, names[i::workers], self.target, *place, options, self.assembled)
            for i in range(workers)
        ]
        with ThreadPoolExecutor(workers) as pool:
            for rows in pool.map(compile_variants, requests):
                for row in rows:
                    emulated.write(rows_at[row.variant], json.dumps(asdict(row)))

    def _row(self, name: str) -> Path:
        """The file that describes a compiled variant."""
        version = importlib.metadata.version("triton")
        how = repr((self.target, self.options, self.assembled))
        what = [name, self.registry, how, version]
        texts = emulated.texts([*self.sources, COMPILER])  # it adds options
        digest = emulated.digest([*what, *texts])
        return self.cache / f"triton_{name}_{digest}.json"

    def library(self, compiled: Compiled) -> Path:
        """The shared library of a variant's PTX."""
        build = emulated.Build(cache=self.cache)
        ptx = Path(compiled.assembly)
        with emulated.locked(self.cache, f"{ptx.stem}.lock"):
            code = emulated.translated_ptx(build, ptx, f"triton_{compiled.kernel}")
            return emulated.shared_library(build, [code], f"triton_{compiled.kernel}")

    def load(self, name: str) -> Kernel:
        """A variant that can be launched; compiles, translates and builds it if needed."""
        return _loaded(self, name)


@cache
def _loaded(kernels: Kernels, name: str) -> Kernel:
    (compiled,) = kernels.compiled([name])
    return Kernel(kernels.library(compiled), compiled)


class Kernel:
    """A variant, and how to launch it."""

    def __init__(self, library: Path, compiled: Compiled) -> None:
        self._launch = emulator().emulator_launch
        entry = getattr(ctypes.CDLL(str(library)), compiled.kernel)
        self._entry = ctypes.cast(entry, ctypes.c_void_p)
        self._compiled = compiled
        types = ("Q" if t.startswith("*") else FORMATS[t] for t in compiled.parameters)
        self._format = "@" + "".join(types)

    def launch(self, grid: Sequence[int], args: Sequence[int | float]) -> None:
        """Launches with all arguments that are not constants, in order; memory is an address."""
        packed = struct.pack(self._format, *args)
        packed += bytes(-len(packed) % 8 + SCRATCH_NBYTES)
        error = ctypes.create_string_buffer(ERROR_NBYTES)
        dims = (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid)))
        one = self._compiled
        sizes = one.threads, one.shared_nbytes
        if self._launch(self._entry, dims, *sizes, packed, error, ERROR_NBYTES):
            raise KernelError(f"{one.variant}: {error.value.decode()}")


def new_kernels(name: str, arch: int) -> Any:
    """zcomm's kernels, compiled for an architecture, as a kernel set."""
    from zcomm.kernels.triton import TritonKernels

    kernels = zcomm_kernels(Target("cuda", arch))

    def launch(variant: Any, programs: int, arguments: Sequence[int]) -> None:
        kernels.load(variant.name).launch((programs,), arguments)

    return TritonKernels(name, launch)


def zcomm_kernels(target: Target, **options: object) -> Kernels:
    import zcomm

    package = Path(zcomm.__file__).parent
    sources = (
        *sorted((package / "kernels" / "triton").glob("*.py")),
        package / "wire" / "header.py",
    )
    sources += (package / "wire" / "lm_tables.py",)
    return Kernels("zcomm.kernels.triton.registry", target, sources, options=tuple(options.items()))


def names_of(specs: Iterable[str]) -> list[str]:
    """The variants that these codecs use, and those that any codec may use."""
    from zcomm import codec
    from zcomm.kernels.triton import registry

    names = {"find_idle", "encode_none", "decode_none", *registry.topk_encode()}
    for c in map(codec, specs):
        names |= {registry.variant_name(call, c.id, c.block) for call in ("encode", "decode")}
    return [name for name in all_names() if name in names]


def all_names() -> list[str]:
    from zcomm.kernels.triton import registry

    return [variant.name for variant in registry.variants()]


@cache
def emulator() -> ctypes.CDLL:
    """The library that the kernels' libraries call."""
    build = emulated.Build()
    folder = emulated.EMULATOR_SOURCES / "simt"
    sources = [folder / f"{stem}.cpp" for stem in emulated.EMULATOR]
    with emulated.locked(build.cache, "emulator.lock"):
        path = emulated.shared_library(build, sources, "emulator", "-fvisibility=default")
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def main() -> None:
    """Builds kernels ahead of the tests: `python emulator/emulated_triton.py ptx90 ptx100`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("kinds", nargs="+")
    parser.add_argument("--short", action="store_true", help="what short_triton.py needs")
    args = parser.parse_args()
    for kind in args.kinds:
        print(f"triton:{kind}: {_built(kind, args.short) if FOUND else NO_TRITON}", flush=True)


def _built(kind: str, is_short: bool) -> str:
    from zcomm.conformance.contract import NAMES, SPECS

    names = names_of(NAMES if is_short else SPECS)
    zcomm_kernels(Target("cuda", int(kind.removeprefix("ptx")))).build(names)
    return f"{len(names)} kernels"


if __name__ == "__main__":
    main()
