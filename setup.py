"""Builds the native modules. Everything else is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

CSRC = Path("csrc")
# GCC's own AVX-512 header draws hundreds of false -Wmaybe-uninitialized.
WARNINGS = ["-Wall", "-Wextra", "-Wno-maybe-uninitialized"]


def core_extension() -> Pybind11Extension:
    """zcomm._core: the CPU kernels.

    No -m flag: the module loads on any CPU of its architecture, and the files of an instruction set
    name it themselves. No contraction: a fused multiply-add rounds once where the wire format
    rounds twice. (pybind11 adds -fvisibility=hidden and -g0.)
    """
    sources = [CSRC / "bind.cpp", *sorted(CSRC.glob("cpu/*.cpp"))]
    return Pybind11Extension(
        "zcomm._core",
        [str(path) for path in sources],
        depends=["setup.py", *map(str, sorted(CSRC.rglob("*.h")))],
        include_dirs=[str(CSRC)],
        cxx_std=17,
        extra_compile_args=["-O3", "-ffp-contract=off", "-pthread", *WARNINGS],
        extra_link_args=["-pthread"],
    )


# MAX_JOBS limits the parallel compilers; without it there is one per CPU.
with ParallelCompile("MAX_JOBS"):
    setup(ext_modules=[core_extension()])
