"""FSDP2 with codecs: what they lose, what they keep, and what must not affect any bit."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp_training as training
from ddp_training import ROUNDING, assert_bit_equal, batch, largest, seeded
from everyones import everyones
from fsdp_training import Outcome, compress, mesh_of, sharded, train
from raised import raised
from ranks import World
from zcomm import codec

pytest_plugins = ["ddp_ranks", "zero_ranks"]

WAYS: dict[str, dict[str, Any]] = {
    "small chunks": {"chunk_mb": 1 / 16},
    "threads": {"threads": 3},
    "no checksums": {"verify": False},
}


def in_every_way(rank: int, world_size: int) -> list[Outcome]:
    """Stages 2 and 3, with settings that must not matter."""
    mesh = mesh_of(world_size)
    settings = {"codec": "lm4", "param_codec": "int8", "feedback": True}
    found = []
    for stage, more in [(2, {}), *((3, more) for more in WAYS.values())]:
        model = sharded(mesh, stage)
        handle = compress(model, **settings, **more)
        found.append(train(model, rank))
        handle.close()
    return found


def test_no_bit_depends_on_stage_chunks_or_threads(pair: World) -> None:
    for first, *others in pair.run(in_every_way):
        for other in others:
            assert other.losses == first.losses
            assert_bit_equal(other.parameters, first.parameters)


# Feedback.


def books(rank: int, world_size: int, count: int, options: dict[str, Any]) -> Any:
    """The sum of everything received plus all residuals, and the sum of the true means."""
    mesh = mesh_of(count)
    if mesh is None:
        return None
    model = sharded(mesh, 3, shard_placement_fn=training.by_columns)
    handle = compress(model, **options)
    got: dict[str, Tensor] = {}
    for _ in range(5):
        for name, gradient in train(model, rank, steps=1, lr=0.0).gradients.items():
            assert gradient is not None
            got[name] = got.get(name, 0) + gradient.double()
    rows = {name: row.values().double() for name, row in handle.state_dict()["residuals"].items()}
    ranks = everyones((training.local_gradients(rank), rows), mesh.get_group())
    gaps = {}
    for name, arrived in got.items():
        mean = sum(mine[name].double() for mine, _ in ranks) / count
        left = sum(rows[name] for _, rows in ranks) if name in rows else torch.zeros(mean.numel())
        gaps[name] = largest(arrived.flatten() + left - 5 * mean.flatten()) / largest(5 * mean)
    return gaps, set(rows), handle.residual_nbytes()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_with_feedback_nothing_is_lost(quartet: World, count: int) -> None:
    options = {"codec": "lm2", "feedback": True, "residual_dtype": "fp32"}
    for gaps, kept, _ in quartet.run(books, count, options)[:count]:
        assert max(gaps.values()) < ROUNDING
        assert "middle.0.weight" in kept
        assert "last.bias" not in kept  # small, so sent uncompressed


def test_residuals_are_int8_unless_they_decay(pair: World) -> None:
    numel = sum(p.numel() for p in training.Net().parameters() if p.numel() >= 100)
    for gaps, _, nbytes in pair.run(books, 2, {"codec": "lm2", "feedback": True}):
        assert max(gaps.values()) < 0.2  # rounding in their own storage
        assert numel < nbytes < 1.2 * numel
    for _, _, nbytes in pair.run(books, 2, {"codec": "topk:0.1"}):
        assert 2 * numel < nbytes < 5 * numel  # bf16, and scratch memory for the largest chunk
    for _, kept, nbytes in pair.run(books, 2, {"codec": "lm4"}):
        assert (kept, nbytes) == (set(), 0)


# Parameters.


def gathered(rank: int, world_size: int, count: int, dtype: torch.dtype | None) -> Any:
    """The parameters that forward sees, those in the shards, and the gather's stats."""
    mesh = mesh_of(count)
    if mesh is None:
        return None
    model = sharded(mesh, 3, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    handle = compress(model, param_codec={"first.*": "none", "*": "int8"})
    train(model, rank, steps=2)
    exact = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    seen = {}
    modules = (("first", model.first), ("middle.2", model.middle[2]), ("last", model))
    for name, module in modules:
        module.unshard()
        layer = model.get_submodule(name)
        seen |= {f"{name}.{n}": p.detach().clone() for n, p in layer.named_parameters()}
        module.reshard()
    return exact, seen, handle.stats().wire_bytes


def expected_parameter(whole: Tensor, spec: str, world_size: int, dtype: torch.dtype) -> Tensor:
    used, rows = codec(spec), -(-whole.shape[0] // world_size)
    shards = [shard.flatten() for shard in whole.to(dtype).split(rows)]
    decoded = [used.decode(used.encode(shard), shard.numel()) for shard in shards]
    return torch.cat(decoded).view_as(whole).to(dtype)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_ranks_decode_the_same_parameters(
    quartet: World, count: int, dtype: torch.dtype | None
) -> None:
    ranks = quartet.run(gathered, count, dtype)[:count]
    exact, seen, _ = ranks[0]
    for _, other, _ in ranks[1:]:
        assert_bit_equal(other, seen)
    used = dtype or torch.float32
    assert len(seen) == 6
    for name in seen:
        spec = "none" if name.startswith("first") or exact[name].numel() < 100 else "int8"
        assert torch.equal(seen[name], expected_parameter(exact[name], spec, count, used)), name
    assert not torch.equal(seen["middle.2.weight"], exact["middle.2.weight"].to(used))


def kept_parameters(rank: int, world_size: int) -> tuple[Any, Any]:
    """The shards before and after forward passes that gather them with a coarse codec."""
    model = sharded(mesh_of(world_size), 3)
    before = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    compress(model, param_codec="lm2")
    for step in range(3):
        model(batch(rank, step)).sum().backward()
    return before, {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def test_the_shards_themselves_stay_exact(pair: World) -> None:
    for before, after in pair.run(kept_parameters):
        assert_bit_equal(after, before)


# Special cases, which torch gathers.


def send_as_bf16(shard: Tensor, mesh: Any) -> Any:
    """A parameter may decide what FSDP gathers for it."""
    return (shard.bfloat16(),), None


def receive_bf16(
    shard: Tensor, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
) -> Any:
    if out is None:
        whole = gathered[0].to(dtype)
        return whole, (whole,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(gathered[0])
    return None


def mixed_model(mesh: Any) -> nn.Module:
    """A frozen bf16 layer and an fp32 layer in one FSDP module."""
    model = seeded(lambda: nn.Sequential(nn.Linear(32, 281), nn.Linear(281, 9)))
    model[0].requires_grad_(False).bfloat16()
    model[0].register_forward_pre_hook(lambda _, args: args[0].bfloat16())
    model[0].register_forward_hook(lambda _, __, out: out.float())
    return fully_shard(model, mesh=mesh)


def casting_model(mesh: Any) -> Any:
    model: Any = fully_shard(seeded(lambda: nn.Linear(32, 280, bias=False)), mesh=mesh)
    shard = model.weight._local_tensor
    shard.fsdp_pre_all_gather = MethodType(send_as_bf16, shard)
    shard.fsdp_post_all_gather = MethodType(receive_bf16, shard)
    return model


def smaller_model(mesh: Any) -> Any:
    """Gathered over all ranks in forward, and over two in backward."""
    model = seeded(training.Net)
    for module in (model.first, model.middle):
        fully_shard(module, mesh=mesh, reshard_after_forward=2)
    return fully_shard(model, mesh=mesh)


SPECIAL = {"mixed": mixed_model, "casting": casting_model, "smaller": smaller_model}


def special_gathers(rank: int, world_size: int) -> dict[str, Any]:
    """Each kind of model, with torch's collectives, with ours, and with encoded parameters."""
    mesh = mesh_of(world_size)
    found: dict[str, Any] = {}
    for name, make in SPECIAL.items():
        plain, ours, coded = make(mesh), make(mesh), make(mesh)
        compress(ours, codec="none")
        compress(coded, codec="none", param_codec="int8")
        found[name] = [train(plain, rank), train(ours, rank), raised(train, coded, rank)]
    return found


def test_gathers_that_are_not_of_parameters_as_they_are(quartet: World) -> None:
    for found in quartet.run(special_gathers):
        for name, (plain, ours, coded) in found.items():
            assert ours.losses == pytest.approx(plain.losses, rel=1e-6), name  # 4 ranks: rounding
            if name == "smaller":
                assert coded.text == "None"
            else:
                assert coded.is_value_error
                assert "param_codec: expected parameters of one dtype" in coded.text


# Other reductions.


def other_reductions(rank: int, world_size: int) -> dict[str, Any]:
    mesh = mesh_of(world_size)
    mine = training.local_gradients(rank)
    total = {name: sum(one[name] for one in everyones(mine, mesh.get_group())) for name in mine}
    found: dict[str, Any] = {"total": total}
    divided = sharded(mesh, 3)
    for module in (divided, divided.first, divided.middle, divided.middle[2]):
        module.set_gradient_divide_factor(5.0)
    compress(divided, codec="none")
    found["divided"] = train(divided, rank, steps=1).gradients
    half = sharded(mesh, 3, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    compress(half, codec="none")
    found["fp16"] = train(half, rank, steps=1).gradients
    started = sharded(mesh, 3)
    handle = compress(started, codec="lm2", start_step=2)
    exact = sharded(mesh, 3)
    compress(exact, codec="none")
    found["starts"] = [
        [train(model, rank, steps=1, lr=0.1).gradients for _ in range(3)]
        for model in (started, exact)
    ]
    found["steps"] = handle.stats().steps
    return found


def test_gradients_can_be_divided_by_any_number(pair: World) -> None:
    for found in pair.run(other_reductions):
        for name, total in found["total"].items():
            scale = total.abs().max()
            assert (found["divided"][name] - total / 5).abs().max() < 1e-6 * scale
            assert (found["fp16"][name] - total / 2).abs().max() < 2e-3 * scale
        started, exact = found["starts"]
        for step in range(2):
            assert_bit_equal(started[step], exact[step])
        assert not torch.equal(started[2]["first.weight"], exact[2]["first.weight"])
        assert found["steps"] == 3
