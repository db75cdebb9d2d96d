"""Checkpoints of compressed FSDP2 models: any number of ranks, nothing lost."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

import fsdp_training as training
from ddp_training import ROUNDING, assert_bit_equal, largest
from fsdp_training import compress, mesh_of, sharded, train
from raised import Raised, raised
from ranks import World
from zcomm import Hierarchy

pytest_plugins = ["ddp_ranks", "zero_ranks"]

Ranks = list[int] | list[list[int]]
LM2: dict[str, Any] = {"codec": "lm2", "feedback": True, "residual_dtype": "fp32"}


def make(mesh: Any, settings: dict[str, Any]) -> tuple[Any, Any]:
    model = sharded(mesh, 3, shard_placement_fn=training.by_columns)
    return model, compress(model, **settings)


def rows(handle: Any) -> dict[str, torch.Tensor]:
    return {n: row.values().clone() for n, row in handle.state_dict()["residuals"].items()}


def save(rank: int, world_size: int, folder: Path, ranks: Ranks, settings: Any) -> Any:
    """Trains on a list of ranks, or on one list per replica, and saves."""
    mesh = mesh_over(ranks)
    if mesh.get_coordinate() is None:
        return None
    model, handle = make(mesh, settings)
    losses = train(model, rank).losses
    state = {"model": get_model_state_dict(model), "zcomm": handle}
    dcp.save(state, checkpoint_id=folder, process_group=whole_group(mesh))
    return rows(handle), training.outcome(model, losses).parameters, train(model, rank).losses


def load(rank: int, world_size: int, folder: Path, ranks: Ranks, settings: Any) -> Any:
    mesh = mesh_over(ranks)
    if mesh.get_coordinate() is None:
        return None
    model, handle = make(mesh, settings)
    train(model, rank, steps=1)  # unrelated training, which must leave no trace
    weights = get_model_state_dict(model)
    state = {"model": weights, "zcomm": handle}
    dcp.load(state, checkpoint_id=folder, process_group=whole_group(mesh))
    set_model_state_dict(model, weights)
    parameters = training.outcome(model, []).parameters
    return rows(handle), parameters, train(model, rank).losses, handle.stats().steps


def mesh_over(ranks: Ranks) -> DeviceMesh:
    """A mesh over a list of ranks; two lists make two replicas."""
    names = ("replicate", "shard") if isinstance(ranks[0], list) else None
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def whole_group(mesh: DeviceMesh) -> Any:
    return mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD


def total(ranks: list[Any], name: str, unit: float = 1.0) -> torch.Tensor:
    return sum(one[0][name].double() for one in ranks if one is not None) * unit


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_residuals_of_3_ranks_load_at_any_number(
    quartet: World, tmp_path: Path, count: int
) -> None:
    before = quartet.run(save, tmp_path, [0, 1, 2], LM2)
    after = quartet.run(load, tmp_path, list(range(count)), LM2)
    for one in after[:count]:
        assert_bit_equal(one[1], before[0][1])
        assert one[3] == (3 if count == 1 else 6)  # saved steps and later ones; one rank sends none
    for name in before[0][0]:
        expected = total(before, name)
        assert largest(total(after, name) - expected) <= ROUNDING * largest(expected), name
    if count == 3:
        for theirs, mine in zip(before[:3], after[:3]):
            assert_bit_equal(mine[0], theirs[0])
            assert mine[2] == theirs[2]  # losses of later steps


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 2.0**-8), ("int8", 2.0**-6)])
@pytest.mark.parametrize("count", [2, 3])
def test_short_residuals_load_to_their_own_rounding(
    quartet: World, tmp_path: Path, dtype: str, bound: float, count: int
) -> None:
    settings = {**LM2, "residual_dtype": dtype}
    before = quartet.run(save, tmp_path, [0, 1, 2], settings)
    after = quartet.run(load, tmp_path, list(range(count)), settings)
    for name in before[0][0]:
        expected = total(before, name)
        assert largest(expected) > 0
        assert largest(total(after, name) - expected) <= bound * largest(expected), name


def test_residuals_of_replicas_load_in_another_mesh(quartet: World, tmp_path: Path) -> None:
    before = quartet.run(save, tmp_path, [[0, 1], [2, 3]], LM2)
    for ranks, unit in ([[0, 1], [2, 3]], 0.5), ([0, 1, 2, 3], 1.0):
        after = quartet.run(load, tmp_path, ranks, LM2)
        for name in before[0][0]:
            expected = total(before, name, 0.5)  # the mean over two replicas
            assert largest(total(after, name, unit) - expected) <= ROUNDING * largest(expected)


def over(hosts: Any) -> dict[str, Any]:
    """Settings for two hops; for one hop without hosts."""
    return {**LM2, "codec": Hierarchy(across="lm2", hosts=hosts)}


EVERYONE, PAIRS, ALONE = [0, 1, 2, 3], [[0, 1], [2, 3]], [[0, 1, 3], [2]]
WAYS = [
    (EVERYONE, PAIRS, EVERYONE, PAIRS),
    (EVERYONE, PAIRS, EVERYONE, 1),
    (EVERYONE, 1, EVERYONE, ALONE),
    (EVERYONE, PAIRS, EVERYONE, ALONE),
    (EVERYONE, ALONE, EVERYONE, ALONE),
    (EVERYONE, ALONE, EVERYONE, [[1], [0], [3, 2]]),
    (EVERYONE, ALONE, [0, 1, 2], ALONE),  # two hosts still
    ([0, 1, 3], ALONE, EVERYONE, PAIRS),  # on one host first
]


@pytest.mark.parametrize(("ranks", "hosts", "then_ranks", "then_hosts"), WAYS, ids=str)
def test_residuals_are_conserved_from_hosts_to_hosts(
    quartet: World,
    tmp_path: Path,
    ranks: list[int],
    hosts: Any,
    then_ranks: list[int],
    then_hosts: Any,
) -> None:
    before = quartet.run(save, tmp_path, ranks, over(hosts))
    after = quartet.run(load, tmp_path, then_ranks, over(then_hosts))
    for rank in then_ranks:
        assert_bit_equal(after[rank][1], before[0][1])
        if (ranks, hosts) == (then_ranks, then_hosts):
            assert_bit_equal(after[rank][0], before[rank][0])
            assert after[rank][2] == before[rank][2]  # losses of later steps
    for name in before[0][0]:
        expected = total(before, name)
        assert largest(expected) > 0
        assert largest(total(after, name) - expected) <= ROUNDING * largest(expected), name


def pickled_over(rank: int, world_size: int) -> tuple[Any, Any]:
    """A pickled state of two hops, loaded with the same hosts and with others."""
    mesh = mesh_of(world_size)
    model, handle = make(mesh, over(PAIRS))
    train(model, rank, steps=1)
    state = pickle.loads(pickle.dumps(handle.state_dict()))
    _, again = make(mesh, over(PAIRS))
    again.load_state_dict(state)
    same = all(torch.equal(row, rows(again)[name]) for name, row in rows(handle).items())
    _, other = make(mesh, over(ALONE))
    return same, raised(other.load_state_dict, state)


def test_a_pickled_state_is_for_the_same_hosts(quartet: World) -> None:
    for rank, (same, error) in enumerate(quartet.run(pickled_over)):
        assert same
        assert error.is_value_error
        here = "[2]" if rank == 2 else "[0, 1, 3]"
        assert f"expected that of rank {rank} of 4 with ranks {here} on its host" in error.text
        assert f"of 4 with {PAIRS[rank // 2]}; use torch.distributed.checkpoint" in error.text


def in_memory(rank: int, world_size: int) -> dict[str, Any]:
    """A copied state and a pickled state continue identically; other states are refused."""
    mesh = mesh_of(world_size)
    model, handle = make(mesh, LM2)
    train(model, rank)
    weights = copy.deepcopy(get_model_state_dict(model))
    copied = copy.deepcopy(handle.state_dict())
    found: dict[str, Any] = {"losses": [train(model, rank).losses]}
    for state in (copied, pickle.loads(pickle.dumps(copied))):
        set_model_state_dict(model, weights)
        handle.load_state_dict(state)
        found["losses"].append(train(model, rank).losses)
    _, other = make(mesh, {**LM2, "codec": "lm3"})
    _, without = make(mesh, {**LM2, "feedback": False})
    moved = pickle.loads(pickle.dumps(copied))
    for row in moved["residuals"].values():
        row.rank = 1 - row.rank
    found["codec"] = raised(other.load_state_dict, copied)
    found["feedback"] = raised(without.load_state_dict, copied)
    found["rank"] = raised(handle.load_state_dict, moved)
    found["not a state"] = raised(handle.load_state_dict, {"a": 1})
    return found


def test_states_in_memory(pair: World) -> None:
    said = {
        "codec": "load_state_dict: expected codecs",
        "feedback": "load_state_dict: expected with residuals",
        "rank": "expected that of rank",
        "not a state": "expected what handle.state_dict() returned",
    }
    for found in pair.run(in_memory):
        first, *others = found["losses"]
        assert others == [first, first]
        for name, text in said.items():
            error: Raised = found[name]
            assert error.is_value_error
            assert text in error.text, (name, error.text)
