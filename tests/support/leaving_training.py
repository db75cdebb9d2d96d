"""A rank that goes away while a call of its own is under way; see test_shared_memory_leaks.py."""

from __future__ import annotations

import torch
import torch.distributed as dist

import zcomm


def call_and_go(rank: int, world_size: int) -> None:
    """Rank 0 waits for the others in three engines, whose threads are in native code, and never
    destroys its process group. The others end first."""
    calls = [
        ("none", torch.ones(100)),
        ("lm4", torch.ones(100)),
        ("none", torch.ones(100).double()),
    ]
    groups = [dist.new_group() for _ in calls]
    for group in groups:
        zcomm.all_reduce(torch.ones(1000), "lm4", group)
    dist.destroy_process_group = lambda *args: None  # type: ignore[assignment]
    if rank == 0:
        for group, (codec, x) in zip(groups, calls):
            zcomm.all_reduce(x, codec, group, async_op=True)
