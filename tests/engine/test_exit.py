"""A process that has finished ends with exit code 0, however slow gloo's threads are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
COMPILER = shutil.which("cc")


def started(folder: Path, way: str) -> subprocess.Popen[str]:
    slow = folder / "slow_gloo_threads.so"
    return subprocess.Popen(
        [sys.executable, "-P", str(SUPPORT / "ended_training.py"), str(folder / way), way],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "LD_PRELOAD": str(slow),
        },
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_a_finished_process_does_not_abort(tmp_path: Path) -> None:
    source, library = SUPPORT / "slow_gloo_threads.c", tmp_path / "slow_gloo_threads.so"
    subprocess.run([str(COMPILER), "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    plain, ours = started(tmp_path, "plain"), started(tmp_path, "zcomm")
    aborts, printed = plain.communicate()[1], ours.communicate()[1]
    if plain.returncode == 0:
        pytest.skip("plain torch does not abort: another torch, or a Python without libpython.so")
    assert "terminate called without an active exception" in aborts
    assert ours.returncode == 0, printed
