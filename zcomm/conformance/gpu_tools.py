"""GPUs on this machine: driver, torch's build, zcomm's kernels, and the compiler."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from zcomm import kernels
from zcomm.kernels import cuda
from zcomm.report.finding import NOTE, OK, PROBLEM, Finding

_PROC_DRIVER = Path("/proc/driver/nvidia/version")
_ANSWER_S = 20.0
SELF_TEST = "python -m zcomm.selftest --device cuda"


def check() -> Finding:
    """A problem only if torch can use a GPU and zcomm cannot, or only slowly."""
    gpus, chosen = _gpus(), kernels.forced() or kernels.default("cuda")
    kernels_absent = cuda.missing()
    found: dict[str, Any] = {
        "nvcc": _nvcc(),
        "driver": driver(),
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "kernels": chosen,
        "kernels_absent": kernels_absent,
    }
    lines = [
        f"nvcc {found['nvcc'] or 'not found'}, driver {found['driver'] or 'not found'}, torch "
        f"{torch_build()}",
        *(f"GPU: {name}" for name in gpus),
        "zcomm's CUDA kernels: "
        + (f"unavailable: {kernels_absent}" if kernels_absent else "available"),
    ]
    if not gpus:
        meaning = f"Gradients on the CPU need none of this. No usable GPU: {absent()}"
        return Finding(NOTE, [*lines, meaning], "", found)
    if chosen == "reference":
        meaning = "Gradients on these GPUs go through plain torch, which is very slow."
        return Finding(PROBLEM, [*lines, meaning], _remedy(kernels_absent), found)
    if chosen not in kernels.ON_GPUS:  # check_kernels says more
        meaning = f"{kernels.KERNELS_VARIABLE}={chosen} names no kernel set for GPUs."
        return Finding(PROBLEM, [*lines, meaning], f"Unset {kernels.KERNELS_VARIABLE}.", found)
    meaning = f"Gradients on these GPUs are compressed there, by {chosen}. Test it with:"
    return Finding(OK, [*lines, f"{meaning} {SELF_TEST}"], "", found)


def torch_build() -> str:
    """Which GPUs this torch is built for."""
    if torch.version.hip:
        return f"for ROCm {torch.version.hip}"
    return f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"


def absent() -> str:
    """Why torch cannot use a GPU here, and the remedy; "" if it can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch was built without CUDA ({torch.__version__}); install a CUDA build: see "
            "pytorch.org/get-started"
        )
    if torch.cuda.is_available():
        return ""
    if torch.version.hip:
        return f"torch {torch_build()} finds no GPU; check that rocminfo lists it"
    if driver() is None:
        return "no CUDA driver; install NVIDIA's driver, so that nvidia-smi works"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"torch finds no GPU under CUDA_VISIBLE_DEVICES={hidden!r}; unset it"
    return (
        f"torch for CUDA {torch.version.cuda} finds no GPU with driver {driver()}; compare the "
        "driver (nvidia-smi) with what this CUDA needs"
    )


def describe(index: int) -> str:
    """A GPU's name and compute capability."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"


def driver() -> str | None:
    """The driver's version, or None."""
    if _PROC_DRIVER.exists():
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", _PROC_DRIVER.read_text())
        if found:
            return found[1]
    path = shutil.which("nvidia-smi")
    query = ["--query-gpu=driver_version", "--format=csv,noheader"]
    found = re.match(r"\d+\.[\d.]+", _answer([path, *query])) if path else None
    return found[0] if found else None


def _remedy(cuda_absent: str) -> str:
    if kernels.forced():
        return f"Unset {kernels.KERNELS_VARIABLE}={kernels.forced()}, unless you want that."
    if torch.version.hip:
        return "Install Triton, whose kernels AMD GPUs use: pip install 'zcomm[triton]'."
    other = (
        "Install CuPy, which compiles the kernels for this GPU: pip install 'zcomm[cupy]' "
        "(torch for CUDA 12: pip install cupy-cuda12x)"
    )
    if isinstance(cuda.load(), str):
        return (
            f"{other}; or install a zcomm wheel with CUDA kernels; or build one where nvcc is "
            "installed: ZCOMM_CUDA=1 pip install ."
        )
    return f"{other}; or fix what keeps the compiled kernels from running: {cuda_absent}."


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    path = shutil.which("nvcc") or shutil.which(str(Path(home, "bin", "nvcc")))
    found = re.search(r"release [\d.]+, V([\d.]+)", _answer([path, "--version"])) if path else None
    return found[1] if found else None


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [describe(i) for i in range(torch.cuda.device_count())]


def _answer(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
