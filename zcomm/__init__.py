"""zcomm: compressed gradient communication for PyTorch data-parallel training."""

import importlib
from typing import Any

from zcomm import monitor
from zcomm.checkpoint import load_checkpoint, save_checkpoint
from zcomm.codecs import Codec, codec
from zcomm.codecs.layout import Layout, Residuals, Segment
from zcomm.collectives import Work, all_gather, all_reduce, reduce_scatter
from zcomm.ddp.hook import HookState, compress, hook
from zcomm.engine.counters import Stats
from zcomm.engine.handle import Handle
from zcomm.kernels import available as available_kernels
from zcomm.planning.memory import MemoryPlan, plan
from zcomm.sharding.feedback import Feedback
from zcomm.sharding.hierarchy import Hierarchy
from zcomm.sharding.settings import Settings
from zcomm.transport.failure_notes import CommunicationError
from zcomm.wire.header import WireError
from zcomm.zero.optimizer import ZeroOptimizer

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
