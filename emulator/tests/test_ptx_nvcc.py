"""What nvcc makes of a kernel, translated and run, against its source compiled for the CPU."""

from __future__ import annotations

import ctypes
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

import ptx_runs

NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc not found: CUDA code is not compiled")
EVERYTHING = Path(__file__).with_name("ptx_everything.cu")
NVCC_FLAGS = ("-O3", "-std=c++17", "--fmad=false", f"-I{ptx_runs.CSRC}", "-ptx")
CTAS, THREADS = 3, 96
COUNT = CTAS * THREADS


class Args(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("values", "bytes", "floats", "words", "longs", "rows")
        ),
        ("count", ctypes.c_long),
        ("mode", ctypes.c_int),
        ("levels", ctypes.c_float * 9),
    )


class Memory:
    """What the kernel is given and what it leaves, aligned for vectors of 16 bytes."""

    def __init__(self, mode: int, rng: random.Random):
        self.buffers: list[ctypes.Array[ctypes.c_char]] = []
        values = [rng.uniform(-3.0, 3.0) for _ in range(4 * COUNT)]
        values[7], values[42], values[101] = float("inf"), 0.0, 1e-41
        self.rows = self.place(8 * COUNT)
        rows = [self.rows + 8 * i for i in range(COUNT)]
        self.args = Args(
            values=self.place(16 * COUNT, struct.pack(f"{4 * COUNT}f", *values)),
            bytes=self.place(8 * THREADS, rng.randbytes(8 * THREADS)),
            floats=self.place(4 * COUNT),
            words=self.place(64 + 16 * COUNT),
            longs=self.place(64, b"\0" * 8 + b"\xff" * 8),
            rows=self.place(8 * COUNT, struct.pack(f"{COUNT}Q", *rows)),
            count=mode + 1,
            mode=mode,
            levels=(ctypes.c_float * 9)(*(rng.uniform(-1.0, 1.0) for _ in range(9))),
        )

    def place(self, nbytes: int, data: bytes = b"") -> int:
        buffer = ctypes.create_string_buffer(nbytes + 16)
        self.buffers.append(buffer)
        address = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % 16
        ctypes.memmove(address, data, len(data))
        return address

    def written(self) -> dict[str, bytes]:
        sizes = {"floats": 4 * COUNT, "words": 64 + 16 * COUNT, "longs": 64}
        written = {n: ctypes.string_at(getattr(self.args, n), size) for n, size in sizes.items()}
        return {**written, "rows": ctypes.string_at(self.rows, 8 * COUNT)}


def run(library: ptx_runs.Library, mode: int) -> dict[str, bytes]:
    memory = Memory(mode, random.Random(mode))
    library("zc_everything", memory.args, ctas=CTAS, threads=THREADS, shared=16 * THREADS)
    return memory.written()


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("emulator")
    return ptx_runs.compile_objects(ptx_runs.emulator_sources(), folder)


@pytest.fixture(scope="module")
def from_source(emulator: list[Path], tmp_path_factory: pytest.TempPathFactory) -> ptx_runs.Library:
    folder = tmp_path_factory.mktemp("source")
    kernel = ptx_runs.compile_objects([EVERYTHING], folder)
    return ptx_runs.link([*kernel, *emulator], folder / "library.so")


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_the_ptx_of_a_kernel_does_what_its_source_does(
    arch: int, emulator: list[Path], from_source: ptx_runs.Library, tmp_path: Path
) -> None:
    ptx = tmp_path / "everything.ptx"
    command = [str(NVCC), *NVCC_FLAGS, f"-arch=compute_{arch}", str(EVERYTHING), "-o", str(ptx)]
    subprocess.run(command, check=True)
    kernel = ptx_runs.compile_objects([ptx_runs.translate(ptx)], tmp_path)
    translated = ptx_runs.link([*kernel, *emulator], tmp_path / "library.so")
    for mode in range(8):
        expected, got = run(from_source, mode), run(translated, mode)
        for name, data in expected.items():
            assert any(data)
            assert got[name] == data, f"mode {mode}: {name} at {first_difference(got[name], data)}"


def first_difference(a: bytes, b: bytes) -> int:
    return next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
