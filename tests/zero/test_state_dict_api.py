"""torch.distributed.checkpoint.state_dict with a ZeroOptimizer: as with a plain optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint.state_dict as api
from torch.optim import AdamW

import state_dict_training as trainings
import zcomm
from ddp_training import assert_bit_equal, seeded
from ranks import World
from zero_training import backward

pytest_plugins = ["ddp_ranks"]

Saved = dict[str, tuple[Any, dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def saved(pair: World, folder: Path) -> Saved:
    """What two ranks had, by the kind of optimizer; the same on both."""
    first, second = pair.run(trainings.save, folder)
    for kind in first:
        assert_same(second[kind][0], first[kind][0])
    return first


def assert_same(state: Any, expected: Any) -> None:
    assert_bit_equal(state["state"], expected["state"])
    assert options(state) == options(expected)


def options(state: Any) -> Any:
    """The groups; torch makes lists of tuples when it takes a whole state."""
    return json.loads(json.dumps(state["param_groups"]))


def test_a_whole_state_is_that_of_the_plain_optimizer(saved: Saved) -> None:
    (state, after), (expected, expected_after) = saved["zero"], saved["plain"]
    assert_same(state, expected)
    assert_bit_equal(after, expected_after)
    shapes = {tuple(held["exp_avg"].shape) for held in state["state"].values()}
    assert {(), (0, 32), (32, 70), (7, 5, 3, 3)} <= shapes


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_either_optimizer_loads_the_others_files_at_any_number_of_ranks(
    pair: World, folder: Path, saved: Saved, world_size: int
) -> None:
    with World(world_size) as own:
        results = (pair if world_size == 2 else own).run(trainings.load, folder)
    for found in results:
        for (kind, _), (state, after) in found.items():
            assert_same(state, saved[kind][0])
            if world_size == 2:  # others see other batches
                assert_bit_equal(after, saved[kind][1])


def test_a_whole_state_can_be_handed_over_in_every_way(pair: World, saved: Saved) -> None:
    for found in pair.run(trainings.whole_states):
        for (saving, *_, way), state in found.items():
            if way == "was on rank 0 only":
                assert state
            else:
                assert_same(state, saved[saving][0])


def test_shards_are_this_ranks_own(pair: World) -> None:
    results = pair.run(trainings.shards)
    for found in results:
        assert found["names"] == found["plain"]
        assert_same(found["again"], found["expected"])
        if found["flat"] is not None:
            assert_same(found["flat"], found["expected"])
        assert found["another rank's"].is_value_error
        assert "a state of another rank" in found["another rank's"].text
        assert found["one rank's"].is_value_error
        assert "got rank 0's shards only" in found["one rank's"].text
    whole = results[0]["expected"]["state"].values()
    elements = sum(held[key].numel() for held in whole for key in ("exp_avg", "exp_avg_sq"))
    parts = [found["elements"] for found in results]
    assert sum(parts) == elements
    assert max(parts) < 0.6 * elements


def test_one_process_needs_no_group() -> None:
    """Unwrapped, and without torch.distributed."""
    model = seeded(trainings.Shapes)
    opt = zcomm.ZeroOptimizer(model, AdamW, lr=1e-2)
    backward(model, 0, 0)
    opt.step()
    for full in (True, False):
        options = api.StateDictOptions(full_state_dict=full)
        state = api.get_optimizer_state_dict(model, opt, options=options)
        new = zcomm.ZeroOptimizer(model, AdamW, lr=0.5)
        api.set_optimizer_state_dict(model, new, state, options=options)
        assert_bit_equal(
            new.consolidated_state_dict()["state"], opt.consolidated_state_dict()["state"]
        )
        assert new.param_groups[0]["lr"] == 1e-2


def test_a_new_optimizer_has_the_initial_state(pair: World, tmp_path: Path) -> None:
    for unchanged, (state, expected) in pair.run(trainings.before_the_first_step, tmp_path):
        assert unchanged
        assert_bit_equal(state, expected)
