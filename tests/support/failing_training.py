"""A model with several buckets and chunks, and what can go wrong with it on its way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zcomm.transport.channels import Channel

TIMEOUT_S = 4.0


def model() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 2000), nn.ReLU(), nn.Linear(2000, 100), nn.ReLU(), nn.Linear(100, 1)]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)


def backward(ddp: DistributedDataParallel) -> None:
    ddp(torch.randn(4, 64)).sum().backward()


class DamagingChannel(Channel):
    """Flips a bit of what arrives from the last other rank."""

    byte = 200

    def all_to_all(self, out: Any, send: Any, out_splits: Any, send_splits: Any) -> Any:
        work = super().all_to_all(out, send, out_splits, send_splits)
        if out.dtype is torch.uint8:  # a chunk, not the signatures in front
            work.wait()
            damage(out, out_splits, self.byte)
        return work


def damage(arrived: Tensor, splits: list[int], byte: int) -> None:
    """Flips a bit of what arrived from the last other rank."""
    start = arrived.numel() - next(n for n in reversed(splits) if n)
    arrived[start + byte] ^= 4
