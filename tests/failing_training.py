"""A model with several buckets and chunks, and what can go wrong with it on its way."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

TIMEOUT_S = 4.0


def model() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 2000), nn.ReLU(), nn.Linear(2000, 100), nn.ReLU(), nn.Linear(100, 1)]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)


def backward(ddp: DistributedDataParallel) -> None:
    ddp(torch.randn(4, 64)).sum().backward()


def damage(arrived: Tensor, splits: list[int], byte: int) -> None:
    """Flips a bit of what arrived from the last other rank."""
    start = arrived.numel() - next(n for n in reversed(splits) if n)
    arrived[start + byte] ^= 4
