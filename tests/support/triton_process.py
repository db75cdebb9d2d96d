"""Runs tests with Triton kernels, which need a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
CONTRACT = TESTS / "contract"


def run_pytest(kind: str, part: Path) -> None:
    """Runs the tests that short_triton.py selects, in a process for `kind` of kernels."""
    environment = {**os.environ, "ZCOMM_TRITON": kind, "OMP_NUM_THREADS": "1"}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "short_triton"]
    done = subprocess.run(
        [*command, str(part)],
        cwd=TESTS,  # not next to the source tree, which Python would import
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
