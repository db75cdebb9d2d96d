"""Ranks of this machine that exchange chunks through shared memory, or over gloo instead."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from zcomm import collectives
from zcomm.engine.engine import Engine
from zcomm.transport.shared_memory import ring
from zcomm.transport.shared_memory.ring import Ring

INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def over(way: str, slot_nbytes: int | None = None) -> Iterator[None]:
    """Engines made meanwhile use the "ring", or "gloo"; in slots of this size."""
    before, size = os.environ.get("ZCOMM_SHM"), ring.slot_nbytes
    os.environ["ZCOMM_SHM"] = "1" if way == "ring" else "0"
    if slot_nbytes is not None:
        ring.slot_nbytes = lambda world_size: slot_nbytes
    try:
        yield
    finally:
        ring.slot_nbytes = size
        os.environ.pop("ZCOMM_SHM")
        if before is not None:
            os.environ["ZCOMM_SHM"] = before


def group_over(
    way: str, ranks: Sequence[int], slot_nbytes: int | None = None, timeout_s: float = 60.0
) -> Any:
    """A new group and its engine; all ranks call it. None on ranks that are not in it."""
    group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
    if dist.get_rank() not in ranks:
        return None
    with over(way, slot_nbytes):
        zcomm.all_reduce(torch.ones(1), "none", group=group)
    assert_over(way, engine_of(group))
    return group


def engine_of(group: Any) -> Engine:
    """The engine of a group's collectives."""
    key = group or dist.group.WORLD
    return next(made.engine for (of, *_), made in collectives._engines.items() if of is key)


def ring_of(group: Any) -> Ring:
    found = engine_of(group).transport.ring
    assert isinstance(found, Ring), found
    return found


def assert_over(way: str, engine: Engine | None) -> None:
    assert engine is not None
    assert isinstance(engine.transport.ring, Ring) == (way == "ring"), engine.transport.ring


def in_chunks(x: Tensor) -> Tensor:
    """The same numbers in half precision. A codec's results are fp32, so Python takes such a job
    through the ring chunk by chunk, and tests can step in (zcomm.engine.host.Turns)."""
    return x.bfloat16()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """The NaNs of a half-precision tensor may differ: torch's own conversion gives several."""
    if a.dtype in (torch.bfloat16, torch.float16):
        a, b = (torch.where(t.isnan(), torch.nan, t) for t in (a, b))
    ints = INTS[a.element_size()]
    return a.dtype is b.dtype and torch.equal(a.view(ints), b.view(ints))


def difficult(rank: int, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Gradients, and among them values that codecs treat specially."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(1000 * seed + rank))
    x[(70 * rank) % 90 :: 100] = 0.0
    x[3::110] = -0.0
    x[256:384] = 0.0  # a block of nothing
    x[400:410] = 1e-41  # denormals
    if n > 5000:
        x[1500 + rank] = float("nan")
        x[2500 - rank] = float("inf")
        x[3500 :: 1 << 16] = float("-inf")
        x.view(torch.int32)[4500 + 50 * rank] = 0x7FC12345  # NaNs with a payload
        x.view(torch.int32)[4501 + 50 * rank] = -0x003EDCBB
    return x.to(dtype)
