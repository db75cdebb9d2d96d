"""zcomm.plan against the memory really in use: torch's allocations, counted below torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from memory_training import Case, Layers, build_counter, measure
from zcomm import _core
from zcomm.launch.ranks import World

WITHIN = 0.02
GB = 10**9
# Many chunks: within the first steps, each of the engine's slots has held one of the largest.
SMALL_CHUNKS = {"chunk_mb": 0.5}
CASES = {
    "plain DDP": Case(0, None, "AdamW"),
    "lm4": Case(0, "lm4", "AdamW"),
    "lm4, bucket views": Case(0, "lm4", "SGD", ddp={"gradient_as_bucket_view": True}),
    "lm4, bf16": Case(0, "lm4", "AdamW", dtype="bfloat16"),
    "lm4, foreach": Case(0, "lm4", "AdamW", options={"foreach": True}),
    "topk": Case(0, "topk:0.01", "SGD"),
    "residuals in bf16": Case(
        0, "lm4", "SGD", options={"feedback": True, "residual_dtype": "bfloat16"}
    ),
    "residuals in int8": Case(
        1, "lm4", "SGD", options={"feedback": True, "residual_dtype": "int8", **SMALL_CHUNKS}
    ),
    "scaler": Case(0, "lm4", "SGD", scaler=True, options={"feedback": True}),
    "ZeRO, scaler": Case(1, "lm4", "SGD", scaler=True, options={"feedback": True, **SMALL_CHUNKS}),
    "ZeRO, exact": Case(1, "lm4", "AdamW", options=SMALL_CHUNKS),
    "ZeRO, lm4": Case(1, "lm4", "AdamW", options={"param_codec": "lm4", **SMALL_CHUNKS}),
    "ZeRO, bf16": Case(
        1, "lm4", "SGD", dtype="bfloat16", options={"momentum": 0.9, **SMALL_CHUNKS}
    ),
    "ZeRO, bucket views": Case(
        1, "lm4", "AdamW", ddp={"gradient_as_bucket_view": True}, options=SMALL_CHUNKS
    ),
}
# Two ranks share memory, three go over gloo as between hosts; these also the other way around.
BOTH_WAYS = ("lm4", "ZeRO, exact", "ZeRO, bf16")
# Three ranks own runs of different lengths; cases that do not depend on that run on two.
ON_THREE = ("lm4", "topk", "residuals in int8", "ZeRO, exact", "ZeRO, lm4", "ZeRO, bf16")


Worlds = dict[tuple[int, bool], World]  # by ranks, and whether they share memory


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    library = build_counter(tmp_path_factory.mktemp("counter"))
    if library is None:
        pytest.skip("needs a C compiler, for the allocator that counts")
    env = {"LD_PRELOAD": str(library)}
    over_gloo = {**env, "ZCOMM_SHM": "0"}
    with ExitStack() as stack:
        yield {
            (ranks, one_host): stack.enter_context(World(ranks, env=env if one_host else over_gloo))
            for ranks in (2, 3)
            for one_host in (True, False)
        }


@pytest.mark.parametrize(
    ("world_size", "one_host", "name"),
    [
        *((2, True, name) for name in CASES),
        *((3, False, name) for name in ON_THREE),
        *((ranks, not one, name) for ranks, one in ((2, True), (3, False)) for name in BOTH_WAYS),
    ],
)
def test_a_plan_is_what_is_alive(
    worlds: Worlds, world_size: int, one_host: bool, name: str
) -> None:
    case = CASES[name]
    world = worlds[world_size, one_host]
    for rank, measured in enumerate(world.run(measure, case, timeout_s=240)):
        planned = case.planned(world_size, rank, one_host)
        assert measured.total == pytest.approx(planned.total, rel=WITHIN), planned
        assert measured.peak == pytest.approx(planned.peak, rel=WITHIN), planned


def test_the_plan_is_that_of_the_rank_that_needs_most() -> None:
    case = CASES["ZeRO, bf16"]
    assert case.planned(3).total == max(case.planned(3, rank).total for rank in range(3))


def large_layers() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24)))


@pytest.mark.parametrize("world_size", [1, 2, 64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stage": 0, "codec": None},
        {"stage": 0, "codec": "topk:0.01", "residual_dtype": torch.bfloat16},
        {"param_codec": "lm4", "dtype": torch.bfloat16, "feedback": True},
    ],
    ids=str,
)
def test_a_number_of_parameters_stands_for_large_layers(
    world_size: int, options: dict[str, Any]
) -> None:
    model = large_layers()
    numel = sum(p.numel() for p in model.parameters())
    planned, counted = (zcomm.plan(what, world_size, **options) for what in (model, numel))
    assert counted.total == pytest.approx(planned.total, rel=WITHIN)
    assert counted.peak == pytest.approx(planned.peak, rel=WITHIN)


def test_billions_of_parameters_on_thousands_of_ranks_are_planned_at_once() -> None:
    zcomm.plan(1000, 2)  # torch.optim imports a lot on first use
    for world_size in (64, 4096):
        started = time.process_time()
        planned = zcomm.plan(7e9, world_size)
        assert time.process_time() - started < 1
        assert planned.parameters == 28 * GB
        assert planned.optimizer == pytest.approx(56 * GB / world_size, rel=WITHIN)
        assert planned.gradients == pytest.approx((28 + 28 / world_size) * GB, rel=WITHIN)


@pytest.mark.parametrize("world_size", [100_000, 1_000_000])
@pytest.mark.parametrize("numel", [100, 7e9])
def test_the_number_of_ranks_costs_no_time(world_size: int, numel: float) -> None:
    zcomm.plan(1000, 2)
    few, many = (calls_of_plan(numel, ranks) for ranks in (64, world_size))
    assert many < 4 * few


def calls_of_plan(numel: float, world_size: int) -> int:
    """How many Python functions a plan calls."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        zcomm.plan(numel, world_size, codec="lm4", param_codec="lm4")
    finally:
        sys.setprofile(None)
    return calls


def test_the_parts_of_a_plan() -> None:
    model = Layers(torch.bfloat16)
    nbytes = sum(p.nbytes for p in model.parameters())
    planned = zcomm.plan(model, 2, optimizer=torch.optim.SGD, momentum=0.9, feedback=True)
    assert planned.parameters == nbytes
    assert planned.masters == pytest.approx(nbytes, rel=WITHIN)  # half of it, in fp32
    assert planned.optimizer == pytest.approx(nbytes, rel=WITHIN)
    assert planned.gradients == pytest.approx(2 * nbytes, rel=WITHIN)
    assert planned.residuals == pytest.approx(2 * nbytes, rel=WITHIN)
    six = planned.parameters + planned.masters + planned.optimizer
    six += planned.gradients + planned.residuals + planned.buffers
    assert planned.total == six
    assert planned.peak == six + planned.transient


def test_frozen_parameters_have_no_gradients() -> None:
    model = Layers()
    model.weights.requires_grad_(False)
    planned = zcomm.plan(model, 2, stage=0)
    assert planned.parameters == sum(p.nbytes for p in model.parameters())
    assert planned.gradients == sum(p.nbytes for p in model.biases)


def test_codecs_by_layer_decide_about_residuals() -> None:
    model = Layers()
    codecs = {"weights.0": "lm4", "*": "none"}
    assert zcomm.plan(model, 2, codec=codecs).residuals == 0
    sent = model.weights[0].nbytes
    assert zcomm.plan(model, 2, codec=codecs, feedback=True).residuals == sent
    owned = zcomm.plan(model, 2, codec=codecs, feedback=True, stage=0).residuals - sent
    assert owned == pytest.approx(sent / 2, rel=WITHIN)


def test_a_printed_plan_is_a_table() -> None:
    lines = str(zcomm.plan(7e9, 64)).splitlines()
    assert lines[0].split() == ["parameters", "28.00", "GB"]
    assert [line.split()[0] for line in lines[-2:]] == ["total", "peak"]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (("model", 2), TypeError, "expected a module or a number of parameters, got 'model'"),
        ((0, 2), ValueError, "a whole number of parameters up to 1e15, got 0"),
        ((1.5, 2), ValueError, "a whole number of parameters up to 1e15, got 1.5"),
        ((1e30, 2), ValueError, r"parameters up to 1e15, got 1e\+30"),
        ((9e18, 2), ValueError, r"parameters up to 1e15, got 9e\+18"),
        ((1000, 0), ValueError, "expected world_size >= 1, got 0"),
    ],
)
def test_models_and_worlds_that_are_refused(arguments: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        zcomm.plan(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"stage": 2}, ValueError, "expected 0 or 1, got 2: plans of FSDP2"),
        ({"codec": zcomm.Hierarchy()}, TypeError, "plans are those of one hop"),
        ({"stage": 4}, ValueError, "expected 0 or 1, got 4"),
        ({"codec": None}, ValueError, "expected one at stage 1, got None"),
        ({"stage": 0, "param_codec": "lm4"}, ValueError, "use stage=1"),
        ({"rank": 2}, ValueError, "expected less than world_size 2, got 2"),
        ({"dtype": "bf17"}, ValueError, "expected a torch.dtype or 'fp32', .* got 'bf17'"),
        ({"dtype": torch.int8}, ValueError, "expected dtype torch.float32"),
        ({"optimizer": "adamv"}, ValueError, "expected one of .*adamw"),
        ({"optimizer": torch.optim}, TypeError, "expected a name such as 'adamw' or a class"),
        ({"optimizer": "sgd", "momentun": 0.9}, ValueError, "momentun"),
        ({"optimizer": "adafactor"}, ValueError, "element by element"),
        ({"optimizer": "adafactor", "stage": 0}, ValueError, "a value for each element"),
        ({"bucket_cap_mb": 0}, ValueError, "expected more than 0, got 0"),
        ({"feedback": 2}, ValueError, "expected a decay between 0 and 1"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        zcomm.plan(10**6, 2, **options)


def test_the_native_core_counts_its_layouts() -> None:
    segments = [zcomm.Segment(zcomm.codec("topk:0.5"), 64, 64 * i) for i in range(1000)]
    before, _ = _core.allocated_nbytes()
    layout = zcomm.Layout(segments)
    layout.encode(torch.randn(64_000), torch.zeros(64_000), kernels="cpu")
    used, most = _core.allocated_nbytes()
    assert used - before > 64 * len(segments)
    assert most - before > used - before + 4 * 64_000  # the candidates of topk
    del layout
    assert _core.allocated_nbytes()[0] == before
