"""zcomm: compressed gradient communication for PyTorch data-parallel training."""

from __future__ import annotations

import importlib
from typing import Any

from zcomm import monitor
from zcomm.api import ZeroOptimizer, compress
from zcomm.checkpoint import load_checkpoint, save_checkpoint
from zcomm.codecs import Codec, codec
from zcomm.collectives import Work, all_gather, all_reduce, reduce_scatter
from zcomm.feedback import Feedback
from zcomm.hierarchy import Hierarchy
from zcomm.hook import Handle, HookState, hook
from zcomm.kernels import available as available_kernels
from zcomm.layout import Layout, Residuals, Segment
from zcomm.memory import MemoryPlan, plan
from zcomm.settings import Settings
from zcomm.stats import Stats
from zcomm.transport import CommunicationError
from zcomm.wire import WireError

__version__ = "0.1.0"

__all__ = [
    "Codec",
    "CommunicationError",
    "Feedback",
    "Handle",
    "Hierarchy",
    "HookState",
    "Layout",
    "MemoryPlan",
    "Residuals",
    "Segment",
    "Settings",
    "Stats",
    "WireError",
    "Work",
    "ZeroOptimizer",
    "all_gather",
    "all_reduce",
    "available_kernels",
    "codec",
    "compress",
    "hook",
    "load_checkpoint",
    "monitor",
    "plan",
    "reduce_scatter",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    """zcomm.fsdp is imported when it is first used: torch's FSDP takes seconds."""
    if name == "fsdp":
        return importlib.import_module("zcomm.fsdp")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
