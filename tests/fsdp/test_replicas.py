"""HSDP: parameters are sharded over each row of a 2-D mesh and replicated over its columns."""

from __future__ import annotations

from typing import Any

import torch

import fsdp_training as training
from ddp_training import assert_bit_equal
from fsdp_training import (
    BF16_FP32,
    Outcome,
    compress,
    mesh_2d,
    sharded,
    slow_engine,
    train,
    watched,
)
from raised import Raised, raised
from ranks import World

pytest_plugins = ["zero_ranks"]


def against_plain(rank: int, world_size: int) -> list[tuple[Outcome, Outcome]]:
    """Plain HSDP, and HSDP with zcomm's reduce-scatter and all-gather; also without all-reduces."""
    mesh, found = mesh_2d(), []
    for options, partial in ({}, False), ({"mp_policy": BF16_FP32}, False), ({}, True):
        pair = []
        for compressed in (False, True):
            model = sharded(mesh, 3, **options)
            if compressed:
                seen = watched(compress(model, codec="none", min_numel=0))
            if partial:
                model.set_requires_all_reduce(False)
                model(training.model_input(model, rank, 9)).square().mean().backward()
                model.set_requires_all_reduce(True)
            with slow_engine():
                pair.append(train(model, rank))
        assert seen.deferred == {False}  # the all-reduce follows immediately
        found.append(tuple(pair))
    return found


def test_codec_none_is_plain_hsdp(quartet: World) -> None:
    for ways in quartet.run(against_plain):
        for plain, ours in ways:
            assert ours.losses == plain.losses
            assert_bit_equal(ours.parameters, plain.parameters)


def with_codecs(rank: int, world_size: int) -> Any:
    model = sharded(mesh_2d(), 3)
    compress(model, codec="lm4", param_codec="int8")
    first = train(model, rank, steps=1, lr=0.0).gradients
    result = train(model, rank)
    model.middle[2].unshard()
    seen = model.middle[2].weight.detach().clone()
    exact = sharded(mesh_2d(), 3)
    compress(exact, codec="lm4")
    return (
        training.local_gradients(rank),
        train(exact, rank, steps=1).gradients,
        first,
        result,
        seen,
    )


def test_replicas_stay_identical(quartet: World) -> None:
    ranks = quartet.run(with_codecs)
    locals_, exact, *_ = zip(*ranks)
    for name in exact[0]:
        rows = [[locals_[r][name] for r in row] for row in ([0, 1], [2, 3])]
        each = [training.expected_gradient(row, "lm4") for row in rows]
        assert torch.equal(exact[0][name], (each[0] + each[1]) / 2), name
    for _, _, first, result, seen in ranks[1:]:
        assert_bit_equal(first, ranks[0][2])
        assert_bit_equal(result.parameters, ranks[0][3].parameters)
        assert torch.equal(seen, ranks[0][4])


def compress_differently(rank: int, world_size: int) -> Raised:
    """Rank 3 differs, and shares no group with rank 0."""
    return raised(compress, sharded(mesh_2d()), codec="int8" if rank == 3 else "lm4")


def test_replicas_that_differ_are_named_on_every_rank(quartet: World) -> None:
    for rank, error in enumerate(quartet.run(compress_differently)):
        assert error.is_value_error
        assert f"rank {rank}: expected the same codec on all ranks" in error.text
        assert "rank 3: {'*': 'int8'}" in error.text
