"""CUDA on this machine: compiler, driver, torch's build. zcomm has no use for it yet."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

from zcomm.cli.finding import NOTE, Finding

_PROC_DRIVER = Path("/proc/driver/nvidia/version")
_ANSWER_S = 20.0


def check() -> Finding:
    """Never a problem: CPU tensors are all that zcomm compresses for now."""
    gpus = _gpus()
    found = {"nvcc": _nvcc(), "driver": _driver(), "cuda": torch.version.cuda, "gpus": gpus}
    lines = [
        f"nvcc {found['nvcc'] or 'not found'}, driver {found['driver'] or 'not found'}, torch "
        + (f"for CUDA {found['cuda']}" if found["cuda"] else "without CUDA"),
        *(f"GPU: {name}" for name in gpus),
        "zcomm is CPU only for now: it needs none of these, and gradients on a GPU are refused.",
    ]
    return Finding(NOTE, lines, details=found)


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    path = shutil.which("nvcc") or shutil.which(str(Path(home, "bin", "nvcc")))
    found = re.search(r"release [\d.]+, V([\d.]+)", _answer([path, "--version"])) if path else None
    return found[1] if found else None


def _driver() -> str | None:
    if _PROC_DRIVER.exists():
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", _PROC_DRIVER.read_text())
        if found:
            return found[1]
    path = shutil.which("nvidia-smi")
    query = ["--query-gpu=driver_version", "--format=csv,noheader"]
    found = re.match(r"\d+\.[\d.]+", _answer([path, *query])) if path else None
    return found[0] if found else None


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _answer(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
