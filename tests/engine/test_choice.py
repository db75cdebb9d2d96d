"""codec="auto": what it decides from given numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import zcomm
from zcomm.base.host import Host
from zcomm.engine.tuning import cost
from zcomm.engine.tuning.check import STEPS, SelfCheck, Step, decided_again
from zcomm.engine.tuning.choice import (
    HYSTERESIS,
    Choice,
    Gradients,
    Model,
    Option,
    best,
    choose,
    without_measuring,
)
from zcomm.engine.tuning.cost import OWN, Cluster, Profile
from zcomm.engine.tuning.measure import CANDIDATES, Measured, Ranks

A, B = Host("a", "b00t", "1"), Host("b", "b00t", "2")
CPU = torch.device("cpu")
PAIR = Ranks(0, [A, B], None)
BUCKETS = [6_250_000] * 4


@pytest.fixture(scope="module")
def profile() -> Profile:
    return cost.load()


def model_at(profile: Profile, bytes_per_s: float, kind: str = "all_reduce") -> Model:
    return Model(profile, Cluster(2, 1, 1, 8, bytes_per_s), Gradients(kind, BUCKETS))


def chosen_at(profile: Profile, bytes_per_s: float) -> Choice:
    model = model_at(profile, bytes_per_s)
    return choose(Measured(profile, model.cluster, 1e10, [], 0.5), model, PAIR)


def test_the_slower_the_link_the_fewer_the_bits(profile: Profile) -> None:
    found = [chosen_at(profile, rate).codec for rate in (1e12, 2e9, 1e9, 1.25e8, 1.25e7)]
    order = [CANDIDATES.index(spec) for spec in found]
    assert order == sorted(order)
    assert order[0] < order[-1]
    assert found[-1] == "lm4"


def test_a_more_exact_codec_may_take_15_percent_longer() -> None:
    options = [Option(spec, 1.0) for spec in (OWN, *CANDIDATES)]
    least = {"none": 9.0, "bf16": 9.0, "int8": HYSTERESIS - 0.01, "lm4": 1.0, OWN: 0.1}
    assert best(options, least) == "int8"
    assert best(options, {**least, "int8": HYSTERESIS + 0.01}) == "lm4"
    assert best(options, {**least, "none": 1.1}) == "none"


def test_the_text_says_why_and_how_to_pin_it(profile: Profile) -> None:
    text = str(chosen_at(profile, 1.25e8))
    assert text.startswith("codec='auto': 1.00 Gbit/s between 2 hosts: lm4 between hosts; expected")
    assert "× plain DDP (communication)" in text
    assert text.endswith("to pin it: codec='lm4'")


def test_a_choice_is_read_as_it_was_written(profile: Profile) -> None:
    choice = chosen_at(profile, 1.25e8)
    assert Choice.loads(choice.dumps()) == choice


def test_one_rank_one_host_and_a_gpu_need_no_measurement() -> None:
    one_host = without_measuring(Ranks(0, [A, A], None), CPU, "shared memory", [9])
    assert one_host is not None
    assert (one_host.codec, one_host.options) == ("none", ())
    assert "all ranks are on one host (shared memory)" in one_host.reason
    alone = without_measuring(Ranks(0, [A], None), CPU, "", [9])
    assert alone is not None
    assert alone.codec == "none"
    gpu = without_measuring(PAIR, torch.device("cuda"), "nccl", [9])
    assert gpu is not None
    assert gpu.codec == "lm4"
    assert without_measuring(PAIR, CPU, "gloo", [9]) is None
    nothing = without_measuring(PAIR, CPU, "gloo", [])
    assert nothing is not None
    assert nothing.codec == "none"


# The check in training.


def test_what_backward_hides_may_be_more_exact(profile: Profile) -> None:
    model, choice = model_at(profile, 1.25e8), chosen_at(profile, 1.25e8)
    assert choice.codec == "lm4"
    # Backward takes ten seconds: all but the last bucket of any codec is hidden.
    lm4 = model.estimates("lm4")[0]
    hidden = Step(s=12.0, exposed_s=lm4.s, window_s=10.0)
    bare = model_at(profile, 1.25e8)
    # The last bucket is small.
    bare.gradients = Gradients("all_reduce", [6_250_000, *[1_000] * 3])
    again = decided_again(choice, bare, hidden, 12)
    assert again.codec != "lm4"
    assert again.step == 12
    assert "backward hides it" in again.reason


def test_what_is_exposed_stays(profile: Profile) -> None:
    model, choice = model_at(profile, 1.25e7), chosen_at(profile, 1.25e7)
    expected = sum(one.s for one in model.estimates("lm4"))
    again = decided_again(choice, model, Step(expected + 0.1, expected, 0.0), 12)
    assert again.codec == "lm4"
    steps = {one.codec: one.step_s for one in again.options}
    assert steps["lm4"] == pytest.approx(expected + 0.1)
    assert steps[OWN] is not None
    assert steps[OWN] > 5 * expected
    assert again.speedup == pytest.approx(steps[OWN] / steps["lm4"])
    assert "(a step)" in str(again)


def test_the_clock_counts_steps_after_the_rebuild() -> None:
    check = SelfCheck()
    exposed = 0.0
    step = 0
    while not check.is_due:
        check.begin_step(step, exposed)
        check.take_bucket(10)
        check.take_bucket(20)
        exposed += 0.25
        step += 1
    assert check.bucket_numels == [10, 20]  # of one step
    assert check.typical().exposed_s == pytest.approx(0.25)
    assert step > 8


# Settings.


def test_auto_may_stand_in_patterns_and_keeps_the_hierarchy() -> None:
    settings = zcomm.Settings({"*.bias": "none", "*": "auto"})
    assert settings.is_auto
    assert settings.chosen("int8").codec == {"*.bias": "none", "*": "int8"}
    two = zcomm.Settings(zcomm.Hierarchy("bf16", "auto", hosts=2)).chosen("lm4")
    assert two.hierarchy == zcomm.Hierarchy("bf16", {"*": "lm4"}, hosts=2)
    assert two.codec == {"*": "lm4"}
    assert not two.is_auto


def test_other_calls_refuse_auto() -> None:
    with pytest.raises(ValueError, match="expected a codec, got 'auto'"):
        zcomm.codec("auto")
    with pytest.raises(ValueError, match="got 'auto'"):
        zcomm.Hierarchy(local="auto")
    with pytest.raises(ValueError, match="expected a codec, got 'auto'"):
        zcomm.plan(1e6, 2, codec="auto")


def test_parameters_are_not_chosen_for() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="param_codec: expected a codec, got 'auto'"):
        zcomm.ZeroOptimizer(model, torch.optim.SGD, param_codec="auto", lr=0.1)


def test_feedback_that_no_residuals_of_8_bits_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="with a decay, got"):
        zcomm.Settings("auto", feedback=0.9, residual_dtype="int8")


def test_steps_before_start_step_are_not_compared() -> None:
    check = SelfCheck(start_step=20)
    for step in range(24):
        check.begin_step(step, 0.0)
    assert not check.is_due
    for step in range(24, 24 + STEPS + 1):
        check.begin_step(step, 0.0)
    assert check.is_due


def test_hosts_of_one_machine_share_its_processors() -> None:
    ranks = Ranks(0, [A, A, B, Host("c", "other", "3")], None)
    assert ranks.host_count == 3
    assert ranks.per_machine() == 3
    assert ranks.here(1) == [0, 1]


def test_unused_numbers_do_not_matter(profile: Profile) -> None:
    choice = chosen_at(profile, 1.25e8)
    assert replace(choice, codec="none").with_codec("lm4") == choice
