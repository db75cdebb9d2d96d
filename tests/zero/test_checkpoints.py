"""Checkpoints of ZeroOptimizer: any number of ranks, bit for bit, complete or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_checkpoints as trainings
from ddp_training import assert_bit_equal
from ranks import World, run_ranks
from zero_checkpoints import BOTH_WAYS

pytest_plugins = ["ddp_ranks", "zero_ranks"]


@pytest.fixture(scope="module")
def saved(quartet: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A checkpoint of 4 ranks, and what they held when they saved it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, quartet.run(trainings.save, folder, BOTH_WAYS, 5)


@pytest.mark.timeout(600)  # eight processes import what DDP needs
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_a_checkpoint_of_4_ranks_loads_at_any_number(
    saved: tuple[Path, list[Any]], world_size: int, pair: World, quartet: World
) -> None:
    folder, before = saved
    with World(world_size) as own:
        world = {2: pair, 4: quartet}.get(world_size, own)
        after = world.run(trainings.load, folder, BOTH_WAYS, timeout_s=500)
    assert_bit_equal(after[0]["whole"]["state"], before[0]["whole"]["state"])
    assert after[0]["whole"]["param_groups"] == before[0]["whole"]["param_groups"]
    for one in after:
        assert_bit_equal(one["parameters"], before[0]["parameters"])
        assert one["step"] == before[0]["step"]
    assert_bit_equal(masters(after), masters(before))
    assert_conserved(after, before)
    if world_size == 4:
        for mine, theirs in zip(after, before):
            assert_bit_equal(mine["residuals"], theirs["residuals"])


def masters(ranks: list[Any]) -> dict[str, Tensor]:
    """The runs of all ranks, joined."""
    joined = {}
    for name in ranks[0]["masters"]:
        parts = sorted((one["masters"][name] for one in ranks), key=lambda part: part[0])
        joined[name] = torch.cat([run for _, run in parts])
    return joined


def assert_conserved(after: list[Any], before: list[Any]) -> None:
    """The sum over the ranks, up to the rounding of three additions."""
    names = before[0]["residuals"]
    assert names
    for name in names:
        old = [one["residuals"][name].double() for one in before]
        new = [one["residuals"][name].double() for one in after]
        bound = 3 * 2**-24 * sum(row.abs() for row in old)
        assert torch.all((sum(new) - sum(old)).abs() <= bound), name
        assert sum(old).abs().max() > 0


SETTINGS = {
    "lm4 both ways, with feedback": BOTH_WAYS,
    "topk with int8 residuals": {
        "codec": "topk:0.05",
        "feedback": True,
        "residual_dtype": torch.int8,
    },
    "sign with bf16 residuals": {"codec": "sign", "residual_dtype": torch.bfloat16},
    "int8, SGD": {"codec": "int8", "optimizer": torch.optim.SGD, "momentum": 0.9, "dampening": 0.5},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_training_goes_on_bit_for_bit(pair: World, tmp_path: Path, name: str) -> None:
    for whole, loaded in pair.run(
        trainings.go_on, tmp_path, SETTINGS[name], torch.float32, "together"
    ):
        assert_bit_equal(loaded, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("param_codec", [None, "lm4"])
def test_loading_the_model_after_the_optimizer_is_no_change(
    pair: World, tmp_path: Path, param_codec: str | None, dtype: torch.dtype
) -> None:
    settings = {"codec": "lm4", "param_codec": param_codec}
    for whole, loaded in pair.run(trainings.go_on, tmp_path, settings, dtype, "model last"):
        assert_bit_equal(loaded, whole)


@pytest.mark.parametrize("to", [0, 1])
def test_an_ordinary_optimizer_takes_over_and_gives_back(pair: World, to: int) -> None:
    results = pair.run(trainings.to_plain_and_back, to)
    plain, again, *_ = results[to]
    assert_bit_equal(again["state"], plain["state"])
    assert again["param_groups"] == plain["param_groups"]
    shapes = {tuple(held["exp_avg"].shape) for held in plain["state"].values()}
    assert (260, 280) in shapes
    for _, _, went_on, took_over in results:
        assert_bit_equal(took_over, went_on)
    for whole in pair.run(trainings.load_whole_everywhere, plain)[:1]:
        assert_bit_equal(whole["state"], plain["state"])


def test_a_state_can_be_copied_and_pickled(pair: World) -> None:
    for copied, pickled in pair.run(trainings.keep_in_memory):
        assert_bit_equal(pickled, copied)


def test_loading_into_something_else_says_what_differs(pair: World, tmp_path: Path) -> None:
    expected = {
        "codec": ["expected codec", "int8", "lm4"],
        "param_codec": ["expected param_codec", "lm4", "None"],
        "optimizer": ["expected optimizer 'Adam', got 'AdamW'"],
        "parameters": ["expected parameters", "'bias'"],
        "not a state": ["expected what opt.state_dict() returned", "['a']"],
        "no state": ["at least one rank"],
    }
    for rank, errors in enumerate(pair.run(trainings.load_errors, tmp_path)):
        for name, words in expected.items():
            assert errors[name].is_value_error, (name, errors[name].text)
            for word in [*words, f"rank {rank}"]:
                assert word in errors[name].text


def test_a_kill_while_saving_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1: died: SIGKILL"):
        run_ranks(2, trainings.save_and_die, tmp_path)
    for step, (loaded, expected), names in run_ranks(2, trainings.load_and_save_again, tmp_path):
        assert step == 2
        assert_bit_equal(loaded, expected)
        assert names == ["latest", "step-000000003.0", "step-000000004.0"]
