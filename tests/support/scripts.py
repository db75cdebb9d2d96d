"""Runs Python scripts as a user would: alone, or on several ranks with torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# A script of plain torch (FSDP2 over gloo, without zcomm) ended like this in one of about 40 runs.
TORCHS_OWN_ABORT = "terminate called without an active exception"


def run(command: list[str], folder: Path, attempts: int = 1) -> str:
    """What the command prints; it must succeed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for _ in range(attempts):
        result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        if TORCHS_OWN_ABORT not in result.stderr:
            break
    assert result.returncode == 0, result.stderr
    return result.stdout


def python(script: Path, folder: Path | None = None) -> str:
    return run([sys.executable, "-P", str(script)], folder or script.parent)


def torchrun(script: Path, folder: Path | None = None, *, ranks: int = 2, attempts: int = 1) -> str:
    """What all ranks print; they run in `folder`, by default the script's own."""
    # A free port of the machine's choice: tests run side by side.
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    options = ["--nproc-per-node", str(ranks), *rendezvous]
    command = [sys.executable, "-P", "-m", "torch.distributed.run", *options, str(script)]
    return run(command, folder or script.parent, attempts)
