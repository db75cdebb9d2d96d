"""Whether restarted ranks can meet again: under torchrun, that depends on the store.

torchrun's agent keeps one store for all restarts. gloo's ranks leave their addresses there, so
restarted ones may find those of dead ones (seen with torch 2.13).
"""

import os
import warnings
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from zcomm.torch_private import c10d


def expect_fresh_store(group: Any) -> None:
    """Warns, once and on rank 0, if a restart could hang."""
    over_gloo = isinstance(c10d.backend_of(group, torch.device("cpu")), c10d.Gloo)
    if over_gloo and dist.get_rank() == 0 and _restarts() and _shared_store():
        _warn()


def _restarts() -> bool:
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _shared_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@cache
def _warn() -> None:
    warnings.warn(
        "zcomm: torchrun may restart ranks, but keeps their old addresses in its store: over gloo, "
        "restarted ranks can hang or fail. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before "
        "torchrun, which heeds it with --standalone or --rdzv-backend c10d",
        stacklevel=2,
    )
