"""The SIMT emulator that runs the CUDA kernels where there is no GPU (emulator/simt).

The checks themselves are C++ (emulator_test.cpp). Bugs are planted in kernels there: an emulator
that does not catch them proves nothing about ours.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

EMULATOR = Path(__file__).resolve().parent.parent
CSRC = EMULATOR.parent / "csrc"
SOURCES = [EMULATOR / "tests" / "emulator_test.cpp"] + [
    EMULATOR / "simt" / f"{stem}.cpp" for stem in ("simt", "cta", "stall", "fiber", "traffic")
]
FLAGS = ["-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-pthread"]
FLAGS += [f"-I{CSRC}", f"-I{EMULATOR}"]
PLAIN = ["-O2"]
SANITIZED = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

# What the emulator says to each planted bug.
PLANTED = {
    "missing-barrier": "the schedules differ",
    "divergent-barrier": "waits at the barrier, but CTA 0, warp 1, lane 5 has exited",
    "barrier-and-vote": "waits in a vote of the lanes 0xffffffff, but lane 3 waits at the barrier",
    "exited-lane": "waits in a shuffle of the lanes 0xffffffff, but lane 7 has exited",
    "missing-lane": "waits in a reduction of the lanes 0xffffffff, but lane 16 does not exist",
    "different-masks": "but lane 5 waits in a shuffle of the lanes 0x0000ffff",
    "different-operations": "but lane 5 waits in a vote of the lanes 0xffffffff",
    "not-in-mask": "lane 16 comes to a vote of the lanes 0x0000ffff",
    "source-outside-mask": "lane 15 asks in a shuffle for the value of lane 16",
    "throws": "misaligned address 0x13",
}


def build(folder: Path, flags: list[str]) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ not found: the emulator is not compiled")
    program = folder / "emulator_test"
    command = [compiler, *FLAGS, *flags, *map(str, SOURCES), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, *mode: str) -> subprocess.CompletedProcess[str]:
    # A hang is what the emulator promises not to do.
    return subprocess.run([program, *mode], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("plain"), PLAIN)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("sanitized"), SANITIZED)


@pytest.mark.parametrize("how", ["plain", "sanitized"])
def test_threads_exchange_share_and_count_as_on_a_gpu(
    how: str, request: pytest.FixtureRequest
) -> None:
    done = run(request.getfixturevalue(how))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" passed, 0 failed\n")


@pytest.mark.parametrize("bug", PLANTED)
@pytest.mark.parametrize("how", ["plain", "sanitized"])
def test_planted_bug_is_caught(bug: str, how: str, request: pytest.FixtureRequest) -> None:
    done = run(request.getfixturevalue(how), bug)
    assert PLANTED[bug] in done.stdout
    assert done.returncode == 1
    assert done.stderr == ""


def test_read_beyond_a_buffer_ends_the_sanitized_process(sanitized: Path) -> None:
    done = run(sanitized, "oob")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "zc_beyond" in done.stderr


def test_read_beyond_a_buffer_is_not_seen_without_the_sanitizer(plain: Path) -> None:
    """The program's only fault is that read: what ends it above is the sanitizer."""
    assert run(plain, "oob").returncode == 0
