"""Builds the CUDA kernels for the emulator: from compiled PTX translated to C++, or from source.

The result is a Python module with the interface of `zcomm._cuda`, whose device memory is the CPU's.
Objects are cached in build/emulated or in a build's own folder, under a hash of their inputs.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "emulated"
EMULATOR_SOURCES = ROOT / "emulator"
TRANSLATOR = EMULATOR_SOURCES / "ptx_to_cpp.py"
NO_NVCC = "nvcc not found: CUDA code is not compiled"
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
# The generated functions are long and flat: higher levels take minutes for little gain.
CXX_FLAGS = ("-std=c++17", "-g0", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing")
CXX_FLAGS += ("-fvisibility=hidden", "-pthread", "-Wno-unknown-pragmas", "-DZC_EMULATED")
# The emulator without the parts that the CUDA modules add.
EMULATOR = ("c_api", "simt", "cta", "fiber", "stall", "traffic")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")


@dataclass(frozen=True)
class Build:
    """What to build: `arch` 0 is the source itself; `kernels` are the stems of some .cu files."""

    arch: int = 0
    kernels: tuple[str, ...] = ()
    sanitize: bool = False
    csrc: Path = ROOT / "csrc"
    cache: Path = CACHE

    @property
    def name(self) -> str:
        kind = f"ptx{self.arch}" if self.arch else "source"
        return f"emulated_{kind}" + ("_sanitized" if self.sanitize else "")

    def kernel_files(self) -> list[Path]:
        files = sorted((self.csrc / "cuda").glob("*.cu"))
        return [f for f in files if not self.kernels or f.stem in self.kernels]


@cache
def load(build: Build) -> Any:
    """The module; builds it if needed."""
    path = build_module(build)
    name = path.stem
    if name not in sys.modules:
        sys.modules[name] = load_file(path)
    return sys.modules[name]


def load_file(path: Path) -> Any:
    # pybind11 returns the same module for the same name, so the name identifies the file. Python
    # looks for the initializer of its last part.
    name = f"{digest([str(path)])}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_module(build: Build) -> Path:
    """The shared library; its file name is a hash of its inputs."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, locked(build.cache):
        objects = list(pool.map(lambda source: _object(build, source), _sources(build)))
        key = digest([p.name for p in objects])
        path = build.cache / f"{build.name}_{key}.so"
        if path.exists():
            return path
        _link(build, objects, path)
        return path


def build_mutant(build: Build, csrc: Path, folder: Path) -> Path:
    """A module with the kernels of another csrc, in `folder`, and the host code of this build.

    So it only takes as long as compiling its kernels.
    """
    mutant = replace(build, csrc=csrc, cache=folder)
    kernels = [_object(mutant, source) for source in mutant.kernel_files()]
    path = folder / "emulated_mutant.so"
    with locked(build.cache):
        _link(build, [*kernels, *(_compiled(build, s) for s in _host_sources(build))], path)
    return path


def _link(build: Build, objects: Sequence[Path], path: Path) -> None:
    bind = _compiled(build, build.csrc / "python" / "cuda.cpp", (f"-DZC_MODULE={path.stem}",))
    command = [_cxx(), "-shared", "-pthread", *(SANITIZE if build.sanitize else ())]
    _run([*command, *map(str, objects), str(bind), "-o", f"{path}.tmp"])
    os.replace(f"{path}.tmp", path)


def shared_library(build: Build, sources: Sequence[Path], stem: str, *flags: str) -> Path:
    """A library of only these sources; its file name is a hash of its inputs."""
    objects = [_compiled(build, source, flags) for source in sources]
    path = build.cache / f"{stem}_{digest([o.name for o in objects])}.so"
    if not path.exists():
        command = [_cxx(), "-shared", "-pthread", *map(str, objects)]
        _run([*command, "-o", f"{path}.tmp"])
        os.replace(f"{path}.tmp", path)
    return path


def _sources(build: Build) -> list[Path]:
    # The largest come first, which keeps both cores busy until the end.
    kernels = sorted(build.kernel_files(), key=lambda f: not f.stem.startswith(("lm", "topk")))
    return [*kernels, *_host_sources(build)]


def _host_sources(build: Build) -> list[Path]:
    host = [build.csrc / "cuda" / f"{stem}.cpp" for stem in ("plan", "launch")]
    host.append(build.csrc / "cpu" / "layout.cpp")
    return [*host, *sorted((EMULATOR_SOURCES / "simt").glob("*.cpp"))]


def _object(build: Build, source: Path) -> Path:
    if source.suffix != ".cu":
        return _compiled(build, source)
    if build.arch == 0:
        return _compiled(build, source, ("-x", "c++"))
    return _compiled(build, translated(build, source))


def translated(build: Build, source: Path) -> Path:
    """The C++ of a kernel file's PTX."""
    return translated_ptx(build, ptx_of(source, build.arch, build.csrc, build.cache), source.stem)


def translated_ptx(build: Build, ptx: Path, stem: str) -> Path:
    translator = [TRANSLATOR, *sorted((EMULATOR_SOURCES / "ptx").glob("*.py"))]
    out = build.cache / f"{stem}_{digest([ptx.read_text(), *texts(translator)])}.cpp"
    if not out.exists():
        _run([sys.executable, str(TRANSLATOR), str(ptx), "-o", f"{out}.tmp"])
        os.replace(f"{out}.tmp", out)
    return out


def ptx_of(source: Path, arch: int, csrc: Path = ROOT / "csrc", cache: Path = CACHE) -> Path:
    """nvcc's output, with the options used for the wheel."""
    assert NVCC is not None, NO_NVCC
    options = (csrc / "cuda" / "nvcc_options.txt").read_text().split()
    options = [f"-I{csrc}" if option == "-Icsrc" else option for option in options]
    key = digest([str(arch), *options, source.read_text(), *_headers(csrc)])
    out = cache / f"{source.stem}_{arch}_{key}.ptx"
    if not out.exists():
        command = [NVCC, *options, f"-arch=compute_{arch}", "-ptx", str(source), "-o"]
        _run([*command, f"{out}.tmp"])
        os.replace(f"{out}.tmp", out)
    return out


def _compiled(build: Build, source: Path, flags: Sequence[str] = ()) -> Path:
    level = "-O1" if source.suffix == ".cu" else "-Og" if source.parent == build.cache else "-O2"
    options = (*CXX_FLAGS, level, *flags, *(SANITIZE if build.sanitize else ()))
    key = digest([*options, source.read_text(), *_headers(build.csrc)])
    out = build.cache / f"{source.stem}_{key}.o"
    if not out.exists():
        _run([_cxx(), *options, *_includes(build.csrc), "-c", str(source), "-o", f"{out}.tmp"])
        os.replace(f"{out}.tmp", out)
    return out


def _includes(csrc: Path) -> list[str]:
    import pybind11

    python = sysconfig.get_paths()["include"]
    return [f"-I{path}" for path in (csrc, EMULATOR_SOURCES, pybind11.get_include(), python)]


@cache
def _headers(csrc: Path) -> tuple[str, ...]:
    """The texts of all headers that kernels and their host code may include."""
    found = [*sorted(csrc.rglob("*.h")), *sorted((EMULATOR_SOURCES / "simt").glob("*.h"))]
    return tuple(texts(f for f in found if f.parent.name != "tests"))


def write(path: Path, text: str) -> None:
    """Writes atomically: another process sees either nothing or the complete file."""
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(text)
    os.replace(beside, path)


def texts(files: Iterable[Path]) -> list[str]:
    return [f.read_text() for f in files]


def digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _cxx() -> str:
    return os.environ.get("CXX", "g++")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


@contextmanager
def locked(cache: Path, name: str = "lock") -> Iterator[None]:
    """One process builds; the others wait and find the result."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / name, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Builds modules ahead of the tests: `python emulator/emulated.py ptx80 source`."""
    for kind in sys.argv[1:]:
        if kind.startswith("nvrtc"):
            _build_nvrtc(kind)
            continue
        build = Build(0 if kind == "source" else int(kind.removeprefix("ptx")))
        if build.arch and NVCC is None:
            print(f"{kind}: {NO_NVCC}")
        else:
            print(f"{kind}: {build_module(build).relative_to(ROOT)}")


def _build_nvrtc(kind: str) -> None:
    """`nvrtc80` builds all kernels; `nvrtc80:default` those for blocks of up to 128 elements."""
    import emulated_driver

    name, _, part = kind.partition(":")
    units = emulated_driver.DEFAULT_UNITS if part else emulated_driver.UNITS
    if not emulated_driver.absent():
        emulated_driver.build_all(int(name.removeprefix("nvrtc")), units)
    print(f"{kind}: {emulated_driver.absent() or emulated_driver.library().relative_to(ROOT)}")


if __name__ == "__main__":
    main()
