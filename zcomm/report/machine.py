"""Where something was measured: part of every report."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

import zcomm


def cpu_isas() -> list[str]:
    """The instruction sets that zcomm can use here, the fastest last."""
    here = [name for name, missing in zcomm.available_kernels().items() if not missing]
    return [name.removeprefix("cpu:") for name in here if name.startswith("cpu:")]


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    return found[1] if found else platform.processor()


def describe() -> dict[str, object]:
    return {
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "isa": os.environ.get("ZCOMM_CPU_ISA") or cpu_isas()[-1],
        "torch": torch.__version__,
        "zcomm": zcomm.__version__,
    }
