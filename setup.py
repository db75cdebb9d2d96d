"""Builds the native modules. Everything else is in pyproject.toml."""

import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

CSRC = Path("csrc")
HEADERS = sorted(CSRC.rglob("*.h"))
# GCC's own AVX-512 header triggers hundreds of false -Wmaybe-uninitialized warnings.
WARNINGS = ["-Wall", "-Wextra", "-Wno-maybe-uninitialized"]
# Code for an architecture runs on its later minor versions; PTX for the last one covers newer GPUs.
CUDA_ARCHS = ("75", "80", "90", "100", "120")
# Headers in csrc/cuda that only host code uses.
HOST_HEADERS = {f"{stem}.h" for stem in ("device_api", "driver", "launch")}
HOST_HEADERS |= {f"{stem}.h" for stem in ("kernels", "plan", "symbols")}


def core_extension() -> Pybind11Extension:
    """zcomm._core: the CPU kernels, and the launcher for CUDA kernels compiled at run time.

    No -m flag: the module loads on any CPU of its architecture, and each file for an instruction
    set names that set itself. No contraction: a fused multiply-add rounds once where the wire
    format rounds twice. (pybind11 adds -fvisibility=hidden and -g0.)
    """
    sources = [CSRC / "python" / "core.cpp", CSRC / "python" / "ring.cpp"]
    sources += sorted([*CSRC.glob("cpu/*.cpp"), *CSRC.glob("shm/*.cpp")])
    sources += [CSRC / "cuda" / f"{stem}.cpp" for stem in ("plan", "launch", "driver")]
    return Pybind11Extension(
        "zcomm._core",
        [str(path) for path in sources],
        depends=["setup.py", *map(str, HEADERS)],
        include_dirs=[str(CSRC)],
        cxx_std=17,
        extra_compile_args=["-O3", "-ffp-contract=off", "-pthread", *WARNINGS],
        extra_link_args=["-pthread"],
    )


def cuda_extension() -> Extension:
    """zcomm._cuda: the kernels for NVIDIA GPUs, and their launcher."""
    sources = sorted(CSRC.glob("cuda/*.cu"))
    sources += [CSRC / "cuda" / f"{stem}.cpp" for stem in ("plan", "launch", "device_api")]
    sources += [CSRC / "python" / "cuda.cpp", CSRC / "cpu" / "layout.cpp"]
    options = CSRC / "cuda" / "nvcc_options.txt"
    return Extension(
        "zcomm._cuda",
        [str(path) for path in sources],
        depends=["setup.py", str(options), *map(str, HEADERS)],
        language="cuda",
    )


def find_nvcc() -> "str | None":
    """The compiler, or None if the module is not wanted (ZCOMM_CUDA=0) or cannot be built."""
    wanted = os.environ.get("ZCOMM_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"ZCOMM_CUDA: expected 0, 1 or nothing, got {wanted!r}")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc") or shutil.which(str(Path(home, "bin", "nvcc")))
    if wanted == "1" and nvcc is None:
        raise SystemExit("ZCOMM_CUDA=1: expected nvcc on PATH or in CUDA_HOME/bin, got none")
    return None if wanted == "0" else nvcc


def cuda_archs(nvcc: str) -> "list[str]":
    """ZCOMM_CUDA_ARCHS, or else those of CUDA_ARCHS that this compiler supports."""
    answer = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    known = [line.removeprefix("compute_") for line in answer.stdout.split()]
    forced = os.environ.get("ZCOMM_CUDA_ARCHS", "").replace(";", " ").replace(",", " ").split()
    for arch in forced:
        if arch not in known:
            raise SystemExit(
                f"ZCOMM_CUDA_ARCHS: expected some of {' '.join(known)}, got {arch!r}; "
                f"{nvcc} knows no others"
            )
    return forced or [arch for arch in CUDA_ARCHS if arch in known]


def device_sources() -> "list[Path]":
    """The kernels' sources, which the cupy kernel set compiles at run time."""
    patterns = ("codec/*.h", "cuda/*.h", "cuda/*.cu", "cuda/nvcc_options.txt")
    found = sorted(path for pattern in patterns for path in CSRC.glob(pattern))
    return [path for path in found if path.name not in HOST_HEADERS]


class BuildPy(build_py):
    """Copies the device sources into the package; in the repository they are in csrc."""

    def run(self) -> None:
        super().run()
        for source in [] if self.editable_mode else device_sources():
            self.mkpath(str(self._placed(source).parent))
            self.copy_file(str(source), str(self._placed(source)))

    def get_outputs(self, include_bytecode: bool = True) -> "list[str]":
        placed = [] if self.editable_mode else map(self._placed, device_sources())
        return [*super().get_outputs(include_bytecode), *map(str, placed)]

    def _placed(self, source: Path) -> Path:
        return Path(self.build_lib, "zcomm", "kernels", source)


class BuildExt(build_ext):
    """Compiles and links zcomm._cuda with nvcc; links CUDA's runtime library statically."""

    def build_extension(self, ext: Extension) -> None:
        if ext.language != "cuda":
            super().build_extension(ext)
            return
        nvcc = find_nvcc()
        assert nvcc is not None
        out = Path(self.get_ext_fullpath(ext.name))
        folder = Path(self.build_temp, "cuda")
        folder.mkdir(parents=True, exist_ok=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
            made = pool.map(
                lambda source: self._object(nvcc, ext, Path(source), folder), ext.sources
            )
            objects = list(made)
        libraries = "--exclude-libs,ALL"
        subprocess.run(
            [nvcc, "-shared", "-cudart", "static", "-Xlinker", libraries, *objects, "-o", str(out)],
            check=True,
        )

    def _object(self, nvcc: str, ext: Extension, source: Path, folder: Path) -> str:
        """Compiles a file if it, or anything it may include, changed since the last time."""
        out = folder / f"{source.stem}{source.suffix}.o"
        options = (CSRC / "cuda" / "nvcc_options.txt").read_text().split()
        options += ["-Xcompiler", "-fPIC,-fvisibility=hidden"]
        archs = cuda_archs(nvcc)
        if source.suffix == ".cu":
            for arch in archs:
                options += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
            options += ["-gencode", f"arch=compute_{archs[-1]},code=compute_{archs[-1]}"]
        else:
            includes = (pybind11.get_include(), sysconfig.get_paths()["include"])
            options += [f"-I{path}" for path in includes]
        if source.parent.name == "python":
            options += ["-Xcompiler", "-DZC_CUDA_ARCHS=" + "\\,".join(archs)]
        command = [nvcc, *options, "-c", str(source), "-o", str(out)]
        made = out.with_suffix(".command")
        needed = max(Path(p).stat().st_mtime for p in (source, *ext.depends) if p != "setup.py")
        fresh = out.exists() and made.exists() and out.stat().st_mtime > needed
        if not fresh or made.read_text() != " ".join(command):
            subprocess.run(command, check=True)
            made.write_text(" ".join(command))
        return str(out)


extensions = [core_extension()]
if find_nvcc():
    extensions.append(cuda_extension())
# MAX_JOBS limits how many compilers run in parallel; the default is one per CPU.
with ParallelCompile("MAX_JOBS"):
    setup(ext_modules=extensions, cmdclass={"build_ext": BuildExt, "build_py": BuildPy})
