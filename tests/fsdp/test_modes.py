"""FSDP2 with zcomm's collectives: the gradients that arrive, and every mode of FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import fsdp_training as training
from ddp_training import assert_bit_equal, batch
from fsdp_training import (
    BF16,
    BF16_FP32,
    Outcome,
    compress,
    mesh_of,
    sharded,
    slow_engine,
    train,
    watched,
)
from ranks import World

pytest_plugins = ["ddp_ranks", "zero_ranks"]

STAGES = [2, 3]


# The gradients that arrive.


def first_gradients(rank: int, world_size: int, count: int, stage: int, spec: str) -> Any:
    """This rank's local gradients, and the reduced ones."""
    mesh = mesh_of(count)
    if mesh is None:
        return None
    model = sharded(mesh, stage)
    compress(model, codec=spec)
    return training.local_gradients(rank), train(model, rank, steps=1).gradients


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_gradients_are_the_sums_of_shards_encoded_once(
    quartet: World, count: int, stage: int
) -> None:
    found = quartet.run(first_gradients, count, stage, "lm4")[:count]
    locals_, gradients = zip(*found)
    for name in gradients[0]:
        expected = training.expected_gradient([one[name] for one in locals_], "lm4")
        for one in gradients:
            assert torch.equal(one[name], expected), name


# codec="none" changes nothing.


def plain_training(model: Any, rank: int) -> Outcome:
    return train(model, rank)


def with_clipping(model: Any, rank: int) -> Outcome:
    return train(model, rank, clip=0.05)


def with_accumulation(model: Any, rank: int) -> Outcome:
    return train(model, rank, accumulate=3)


def with_sums_of_reduced_gradients(model: Any, rank: int) -> Outcome:
    return train(model, rank, accumulate=2, sync_each=True)


def with_prefetch(model: Any, rank: int) -> Outcome:
    model.set_modules_to_forward_prefetch([model.first, model.middle])
    model.middle.set_modules_to_backward_prefetch([model.middle[2], model.first])
    model.first.unshard(async_op=True)
    return train(model, rank)


def with_sums(model: Any, rank: int) -> Outcome:
    for module in (model, model.first, model.middle, model.middle[2]):
        module.set_force_sum_reduction_for_comms(True)
    return train(model, rank)


def with_own_reduction(model: Any, rank: int) -> Outcome:
    model.middle.set_all_reduce_hook(lambda gradient: gradient.mul_(0.5))
    return train(model, rank)


def with_optimizer_in_backward(model: Any, rank: int) -> Outcome:
    """Updates each parameter as soon as its gradient is ready."""

    def update(p: Any) -> None:
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.5)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return train(model, rank, lr=0.0)


def with_frozen_parameters(model: Any, rank: int) -> Outcome:
    for p in (model.middle[0].weight, model.last.bias, *model.first.parameters()):
        p.requires_grad_(False)
    return train(model, rank)


def with_another_separate_group(model: Any, rank: int) -> Outcome:
    model.set_separate_reduce_scatter_group()
    return train(model, rank)


def with_kept_parameters(model: Any, rank: int) -> Outcome:
    """Keeps parameters gathered for all batches of a step."""
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(4):
        last = step % 2 == 1
        model.set_reshard_after_backward(last)
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        losses.append(loss.item())
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return training.outcome(model, losses)


def with_unused_parameters(model: Any, rank: int) -> Outcome:
    losses = []
    for other in (False, True, True, False):
        model.other = other
        losses += train(model, rank, steps=1).losses
    return training.outcome(model, losses)


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (plain_training, {}),
    "bf16": (plain_training, {"mp_policy": BF16}),
    "bf16 reduced in fp32": (with_accumulation, {"mp_policy": BF16_FP32}),
    "clipping": (with_clipping, {}),
    "accumulation": (with_accumulation, {}),
    "reduced accumulation": (with_sums_of_reduced_gradients, {}),
    "prefetch": (with_prefetch, {}),
    "sums": (with_sums, {}),
    "own reduction": (with_own_reduction, {}),
    "optimizer in backward": (with_optimizer_in_backward, {}),
    "frozen": (with_frozen_parameters, {}),
    "separate group": (with_another_separate_group, {}),
    "kept parameters": (with_kept_parameters, {}),
    "offload": (plain_training, {"offload_policy": training.OFFLOAD}),
    "fp64": (plain_training, {"model": lambda: training.Net().double()}),
    "columns": (plain_training, {"shard_placement_fn": training.by_columns}),
    "unused": (with_unused_parameters, {"model": training.Branches}),
    "checkpointed": (plain_training, {"model": training.Checkpointed}),
    "dtypes of gradients": (plain_training, {"model": training.AnyGradientDtype}),
}


# Modes in which FSDP does not always let a reduce-scatter overlap backward.
DEFERRED: dict[str, set[bool]] = {
    "bf16": {False},  # cast
    "reduced accumulation": {True, False},  # added to the first
    "sums": {False},  # divided afterwards
    "own reduction": {True, False},  # of one module
    "optimizer in backward": {False},
    "offload": {False},
    "fp64": {False},  # divided before and afterwards
}


def both(rank: int, world_size: int, count: int, way: str) -> list[tuple[Outcome, Outcome]] | None:
    """The results of plain FSDP2 and of zcomm's collectives, at both stages."""
    mesh = mesh_of(count)
    if mesh is None:
        return None
    run, options = WAYS[way]
    found, handles = [], []
    for stage in STAGES:
        pair = []
        for compressed in (False, True):
            model = sharded(mesh, stage, **options)
            if compressed:
                handles.append(watched(compress(model, codec="none", min_numel=0)))
            with slow_engine():
                pair.append(run(model, rank))
        found.append(tuple(pair))
    for one in handles:
        assert one.handle.stats().wire_bytes > 0
        assert one.deferred == DEFERRED.get(way, {True})
        assert max(one.under_way) == (1 if one.deferred == {True} else 0) or len(one.deferred) == 2
        one.handle.close()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_codec_none_is_plain_fsdp2_to_the_bit(pair: World, way: str) -> None:
    if way == "separate group" and not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
        pytest.skip("this torch has no FSDPModule.set_separate_reduce_scatter_group")
    for stages in pair.run(both, 2, way):
        for plain, ours in stages:
            assert ours.losses == plain.losses
            assert_bit_equal(ours.parameters, plain.parameters)
            assert_bit_equal(ours.gradients, plain.gradients)


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize(
    "way", ["plain", "bf16", "bf16 reduced in fp32", "clipping", "accumulation", "unused"]
)
def test_codec_none_is_plain_fsdp2_to_rounding(quartet: World, count: int, way: str) -> None:
    """With more than two ranks, torch adds in a different order, and in bf16 if it reduces bf16."""
    bound = 2.0**-6 if way == "bf16" else 1e-5
    for stages in quartet.run(both, count, way)[:count]:
        for plain, ours in stages:
            assert ours.losses == pytest.approx(plain.losses, rel=bound)
            for name, p in plain.parameters.items():
                torch.testing.assert_close(ours.parameters[name], p, rtol=bound, atol=bound)
