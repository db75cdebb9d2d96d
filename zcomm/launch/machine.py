"""This machine: its processor, which every report names, and its free memory."""

import os
import platform
import re
from pathlib import Path

import torch

from zcomm import kernels
from zcomm.report.usage import UsageError

# What Python, torch and the engine of one rank need, besides its tensors.
RANK_NBYTES = 400 << 20


def cpu_isas() -> list[str]:
    """The instruction sets that zcomm can use here, fastest last."""
    here = [name for name, missing in kernels.available().items() if not missing]
    return [name.removeprefix("cpu:") for name in here if name.startswith("cpu:")]


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    return found[1] if found else platform.processor()


def describe(version: str) -> dict[str, object]:
    """Where something was measured, with this version of zcomm."""
    return {
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "isa": os.environ.get("ZCOMM_CPU_ISA") or cpu_isas()[-1],
        "torch": torch.__version__,
        "zcomm": version,
    }


def expect_memory(nbytes: float, ranks: int, option: str) -> None:
    """Refuses an option if that many ranks, with `nbytes` of tensors each, do not fit in memory."""
    needed = ranks * (nbytes + RANK_NBYTES)
    free = free_nbytes()
    if needed > free:
        raise UsageError(
            f"expected {option} to fit in the {free / 2**30:.1f} GiB that are free here, got one "
            f"that needs {needed / 2**30:.1f} GiB on {ranks} ranks; choose a smaller size, or "
            "fewer ranks"
        )


def free_nbytes() -> float:
    """Memory available without swapping, also in a container with a limit."""
    return min(machine_free_nbytes(), container_free_nbytes())


def machine_free_nbytes() -> float:
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s*(\d+)", meminfo.read_text() if meminfo.exists() else "")
    return int(found[1]) * 1024.0 if found else float("inf")


def container_free_nbytes() -> float:
    cgroup = Path("/sys/fs/cgroup")
    try:
        most = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if most == "max" else int(most) - used
