"""What leaves a host when its ranks do one step: bytes at its network interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import seeded
from zcomm.launch import hosts


def sent(step: Callable[[], object], ranks_here: int) -> float:
    """By all ranks of this host in one step. All ranks call it."""
    step()  # creates engines and rebuilds DDP's buckets
    dist.barrier()
    before = hosts.sent_bytes()
    step()
    dist.barrier()
    return (hosts.sent_bytes() - before) * ranks_here


def collective(codec: Any, group: Any = None) -> Callable[[], object]:
    x = torch.randn(1_000_000)
    return lambda: zcomm.all_reduce(x, codec, group)


def wide() -> DistributedDataParallel:
    return DistributedDataParallel(seeded(lambda: nn.Linear(1000, 1000)))


def hook_step(codec: Any) -> Callable[[], object]:
    ddp = wide()
    zcomm.compress(ddp, codec)
    return lambda: [ddp(torch.randn(4, 1000)).sum().backward() for _ in range(3)]


def zero_step(codec: Any) -> Callable[[], object]:
    ddp = wide()
    opt = zcomm.ZeroOptimizer(ddp, optim.SGD, codec=codec, param_codec="int8", lr=0.1)

    def steps() -> None:
        for _ in range(3):
            ddp(torch.randn(4, 1000)).sum().backward()
            opt.step()

    return steps


STEPS = {"all_reduce": collective, "hook": hook_step, "ZeRO": zero_step}
