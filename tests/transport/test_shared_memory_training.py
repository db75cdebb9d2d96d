"""Training gives the same parameters over shared memory as over gloo, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import Mixed, Net, assert_bit_equal, residuals, seeded
from fsdp_training import BF16, compress, sharded
from fsdp_training import train as train_fsdp
from ranks import World
from shared_ranks import assert_over, over
from zero_training import Assorted, parameters, wrapped, zero
from zero_training import train as train_with

pytest_plugins = ["zero_ranks"]

MIXED = {"first.*": "int8", "middle.*": "lm3", "*": "none"}
# Rows of pieces of none fit into these, and so the chunks of a bucket are many.
SLOT = 272 << 10
Trained = dict[str, Any]


def ddp(rank: int, group: Any, way: str, model: Any, **settings: Any) -> Trained:
    made = DistributedDataParallel(seeded(model), process_group=group, bucket_cap_mb=0.2)
    handle = zcomm.compress(made, **settings)
    assert_over(way, handle._compressor.engine)
    train_with(made, torch.optim.SGD(made.parameters(), lr=0.1), rank, steps=4)
    assert (handle.stats().shared_bytes > 0) == (way == "ring")
    left = residuals(handle)
    handle.close()
    return {"parameters": parameters(made), "residuals": left}


def zero_optimizer(rank: int, group: Any, way: str, model: Any, **options: Any) -> Trained:
    training = {key: options.pop(key) for key in ("accumulate", "synchronised") if key in options}
    made = wrapped(model, process_group=group, bucket_cap_mb=0.2)
    optimizer = zero(torch.optim.AdamW, lr=1e-2, **options)(made)
    assert_over(way, optimizer.handle._compressor.engine)
    train_with(made, optimizer, rank, steps=4, **training)
    optimizer.close()
    return parameters(made)


def fsdp(rank: int, group: Any, way: str, **settings: Any) -> Trained:
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    options = {key: settings.pop(key) for key in ("mp_policy",) if key in settings}
    model = sharded(mesh, **options)
    handle = compress(model, **settings)
    for engine in handle._compressor.engines():
        assert_over(way, engine)
    outcome = train_fsdp(model, rank)
    handle.close()
    return {"losses": torch.tensor(outcome.losses), **outcome.parameters}


WAYS: dict[str, Callable[..., Trained]] = {
    "DDP, none": lambda *at: ddp(*at, Net, codec="none"),
    "DDP, lm4 with feedback": lambda *at: ddp(*at, Net, codec="lm4", feedback=True, min_numel=0),
    "DDP, mixed codecs": lambda *at: ddp(*at, Net, codec=MIXED, chunk_mb=1 / 16),
    "DDP, bf16": lambda *at: ddp(*at, Net, codec="bf16", min_numel=0),
    "DDP, mixed dtypes": lambda *at: ddp(*at, Mixed, codec="lm4"),
    "ZeRO, none": lambda *at: zero_optimizer(*at, Assorted),
    "ZeRO, accumulated": lambda *at: zero_optimizer(*at, Net, accumulate=3, synchronised=True),
    "ZeRO, lm4": lambda *at: zero_optimizer(
        *at, Net, codec="lm4", param_codec="int8", accumulate=2, synchronised=True
    ),
    "ZeRO, mixed dtypes": lambda *at: zero_optimizer(*at, Mixed, codec="lm4", accumulate=2),
    "FSDP2, none": lambda *at: fsdp(*at, codec="none"),
    "FSDP2, lm4": lambda *at: fsdp(*at, codec="lm4", param_codec="int8", feedback=True),
    "FSDP2, bf16": lambda *at: fsdp(*at, codec="none", mp_policy=BF16),
}


# Plain loops and chunks, with an even and an odd number of ranks.
COUNTS = [(name, 2 + i % 3) for i, name in enumerate(WAYS)]
COUNTS += [("DDP, none", 3), ("ZeRO, none", 3), ("ZeRO, accumulated", 2), ("FSDP2, none", 4)]


def train_both_ways(rank: int, world_size: int, name: str, count: int) -> None:
    group = dist.new_group(range(count))
    if rank >= count:
        return
    found = []
    for way in ("ring", "gloo"):
        with over(way, SLOT if way == "ring" else None):
            found.append(WAYS[name](rank, group, way))
    assert_bit_equal(*found)


@pytest.mark.parametrize(("name", "count"), COUNTS)
def test_training_has_the_bits_of_gloo(quartet: World, name: str, count: int) -> None:
    quartet.run(train_both_ways, name, count)
