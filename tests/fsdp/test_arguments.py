"""Arguments that zcomm.fsdp.compress refuses, and a world of one rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import zcomm.fsdp
from ddp_training import assert_bit_equal
from fsdp_training import Net, Outcome, compress, sharded, train
from raised import Raised, raised
from ranks import World, run_ranks

pytest_plugins = ["ddp_ranks"]


def refusals(rank: int, world_size: int) -> dict[str, Raised]:
    twice = sharded(None)
    compress(twice)
    tensor_parallel = nn.Linear(8, 8)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel.weight = nn.Parameter(
        distribute_tensor(tensor_parallel.weight.detach(), mesh["tp"], [Shard(0)])
    )
    fully_shard(tensor_parallel, mesh=mesh["dp"])
    compress_ = zcomm.fsdp.compress
    return {
        "none": raised(compress_, Net()),
        "no model": raised(compress_, 3),
        "ddp": raised(compress_, DistributedDataParallel(Net())),
        "fsdp1": raised(compress_, FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))),
        "twice": raised(compress_, twice),
        "tensor parallel": raised(compress_, tensor_parallel),
        "setting": raised(compress_, sharded(None), scaler=None),
        "param_codec": raised(compress_, sharded(None), param_codec="topk:0.1"),
        "int8 decay": raised(compress_, sharded(None), codec="sign", residual_dtype="int8"),
        "pattern": raised(compress_, sharded(None), codec={"first.*": "lm4"}),
        "param pattern": raised(compress_, sharded(None), param_codec={"first.*": "int8"}),
        "hierarchy": raised(compress_, sharded(None), param_codec=zcomm.Hierarchy(hosts=1)),
        "empty": raised(compress_, fully_shard(nn.Tanh())),
    }


SAID = {
    "none": "TypeError: zcomm.fsdp.compress: expected a model with fully_shard, got Net; call",
    "no model": "TypeError: zcomm.fsdp.compress: expected a model with fully_shard, got 3;",
    "ddp": "TypeError: .* got a DistributedDataParallel; use zcomm.compress",
    "fsdp1": r"TypeError: .* got a FullyShardedDataParallel \(FSDP1\); use fully_shard",
    "twice": "ValueError: module '': expected torch's own collectives, got CompressedReduceScatter",
    "tensor parallel": "ValueError: parameter 'weight': expected a parameter that only FSDP shards",
    "setting": "TypeError: .*unexpected keyword argument 'scaler'",
    "hierarchy": "TypeError: .* expected param_codec as a codec or patterns, got a Hierarchy",
    "param_codec": "ValueError: param_codec: expected a codec that sends all of a weight",
    "int8 decay": "ValueError: residual_dtype: expected torch.float32 or torch.bfloat16",
    "pattern": "ValueError: codec: expected a pattern that matches parameter",
    "param pattern": "ValueError: codec: expected a pattern that matches parameter",
    "empty": "ValueError: zcomm.fsdp.compress: expected an FSDP module with parameters",
}


def test_what_cannot_be_compressed_is_refused(pair: World) -> None:
    for found in pair.run(refusals):
        for name, text in SAID.items():
            assert re.search(text, f"{found[name].type}: {found[name].text}"), found[name].text


def alone(rank: int, world_size: int) -> tuple[Outcome, Outcome, Any]:
    plain, model = sharded(None), sharded(None)
    handle = compress(model, codec="lm2", feedback=True, param_codec="int8")
    found = train(plain, rank), train(model, rank)
    stats = handle.stats()
    handle.load_state_dict(handle.state_dict())
    handle.close()
    return *found, stats.wire_bytes


def test_one_rank_sends_nothing_and_loses_nothing() -> None:
    plain, ours, sent = run_ranks(1, alone)[0]
    assert ours.losses == plain.losses
    assert_bit_equal(ours.parameters, plain.parameters)
    assert sent == 0


def test_a_handle_says_what_it_is(pair: World) -> None:
    for text, stats in pair.run(described):
        assert "lm4" in text
        assert "step 2, 4 modules, 1 × 2 ranks" in text
        assert stats.steps == 2
        assert stats.raw_bytes > stats.wire_bytes > 0
        assert stats.ratio > 2


def described(rank: int, world_size: int) -> Any:
    model = sharded(None, 2)
    handle = compress(model, param_codec="int8")
    train(model, rank, steps=2)
    assert handle.buffer_nbytes() > 0
    return repr(handle), handle.stats()


def test_zcomm_fsdp_is_there_when_it_is_asked_for() -> None:
    import zcomm

    assert zcomm.fsdp.compress is zcomm.fsdp.compress
    with pytest.raises(AttributeError, match="no attribute 'fsdp1'"):
        zcomm.fsdp1  # noqa: B018
