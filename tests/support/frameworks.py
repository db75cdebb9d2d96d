"""Two ranks that frameworks take for ranks of torchrun, and what they train."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

FEEDBACK: dict[str, Any] = {"codec": "lm4", "feedback": True}


def be_a_torchrun_rank(rank: int, world_size: int) -> None:
    """The group exists already; frameworks take it, and read the rest from the environment."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # nobody may use it
        "TORCHELASTIC_RUN_ID": "tests",
    }


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def examples(count: int = 512) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 64, generator=torch.Generator().manual_seed(1))
    return x, x[:, :10].argmax(1)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}
