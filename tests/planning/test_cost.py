"""The cost model: its parts, its fit, and a fit on real ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import zcomm
from ranks import World
from zcomm import collectives
from zcomm.cli.bench import fit
from zcomm.cli.bench.collective_rows import Row, rows_of, wire_nbytes
from zcomm.cli.bench.collective_tasks import Key, measure
from zcomm.engine.tuning import cost
from zcomm.engine.tuning.cost import (
    BUCKET_NBYTES,
    KINDS,
    OWN,
    Cluster,
    Profile,
    Strategy,
    Workload,
    exposed_in_backward,
    step_time,
)
from zcomm.engine.tuning.fit import predicted_cpu_s, predicted_s, profile_of
from zcomm.launch.launchers import LOOPBACK, Launcher
from zcomm.report.usage import UsageError
from zcomm.sharding.chunks import Item, best_chunk_size, block_of, make_chunks
from zcomm.sharding.owners import owner_bounds

MB = 1_000_000


@pytest.fixture
def profile() -> Profile:
    return cost.load(cost.DEFAULT_PROFILE)


@pytest.mark.parametrize(
    ("world_size", "spec", "numel"),
    list(product((2, 4, 5), ("none", "int8", "lm4", "topk:0.01"), (40_000, 6_553_600))),
)
def test_a_load_is_that_of_the_engines_chunks(world_size: int, spec: str, numel: int) -> None:
    codec = zcomm.codec(spec)
    bounds = owner_bounds([(numel, block_of(codec))], world_size)[0]
    size = best_chunk_size(world_size)
    chunks = make_chunks([Item("", codec, numel, 0, bounds)], 0, world_size, size)
    load = cost.load_of("all_reduce", numel, spec, world_size)
    assert load.chunks == pytest.approx(len(chunks), abs=1, rel=0.1)
    assert load.encoded == pytest.approx(numel * (1 + 1 / world_size))
    for kind in KINDS:
        sent = wire_nbytes(Key(kind, spec), 4 * numel, world_size)
        planned = cost.load_of(kind, numel, spec, world_size).sent
        assert planned == pytest.approx(sent, rel=0.05, abs=500)  # frames are padded


def test_one_chunk_overlaps_with_nothing_and_many_do_but_for_a_part() -> None:
    assert cost.overlapped(3.0, 2.0, 0.25, 1) == 5.0
    assert cost.overlapped(2.0, 3.0, 0.25, 1 << 30) == pytest.approx(3.5)


def test_ranks_that_share_a_link_send_what_one_rank_would(profile: Profile) -> None:
    alone = Cluster(8, 1, 1, 2, 125 * MB)
    paired = alone._replace(ranks_per_link=2)
    one, two = (
        cost.estimate(profile, "all_reduce", 25 * MB, "int8", cluster).line_s
        for cluster in (alone, paired)
    )
    # 2 (H - 1) / H of the gradient leaves each of H hosts.
    assert two / one == pytest.approx((3 / 4) / (7 / 8), rel=1e-3)


def test_ranks_that_share_a_processor_take_turns_on_it(profile: Profile) -> None:
    alone = Cluster(4, 1, 2, 2, 125 * MB)
    crowded = alone._replace(ranks_per_machine=4)
    one, two = (
        cost.estimate(profile, "all_reduce", 25 * MB, "lm4", cluster)
        for cluster in (alone, crowded)
    )
    assert two.processor_s == pytest.approx(2 * one.processor_s)
    assert two.s > one.s
    assert two.line_s == one.line_s


def test_ranks_of_one_host_need_no_line(profile: Profile) -> None:
    cluster = Cluster(4, 4, 4, 8, 125 * MB)
    for spec in ("lm4", OWN):
        assert cost.estimate(profile, "all_reduce", 25 * MB, spec, cluster).line_s == 0


def test_one_rank_sends_nothing(profile: Profile) -> None:
    assert cost.estimate(profile, "all_reduce", MB, "lm4", Cluster(1, 1, 1, 1, 1.0)).s == 0


def rows_as_predicted(profile: Profile) -> list[Row]:
    """What a machine that matches the model exactly would measure."""
    rows = []
    for size, kind, spec in product(fit.SIZES, KINDS, (OWN, *fit.CODECS)):
        key = Key(kind, spec)
        row = Row(kind, spec, size, 2, wire_nbytes(key, size, 2), [], 0.0, 1.0, [], 0.0, 0)
        cluster = fit.cluster_of(2, profile.bytes_per_s)
        cpu_s = predicted_cpu_s(profile, row, cluster) if spec else profile.own_wire_s * size
        rows.append(replace(row, seconds=[predicted_s(profile, row, cluster)], cpu_s=cpu_s))
    return rows


def test_a_fit_finds_the_numbers_of_a_machine_that_is_like_the_model(profile: Profile) -> None:
    truth = replace(
        profile, latency_s=2e-3, chunk_s=3e-4, wire_s=2e-9, unhidden=0.2, own_step_s=5e-4
    )
    cluster = fit.cluster_of(2, truth.bytes_per_s)
    found = profile_of(rows_as_predicted(truth), truth.codecs, truth.message_s, {}, cluster)
    for name in ("latency_s", "chunk_s", "wire_s", "unhidden", "own_wire_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.1), name


def local_launcher(world: World) -> Launcher:
    return Launcher(world.run, *[world.world_size] * 2, LOOPBACK)


def routes(rank: int, world_size: int) -> list[str]:
    return [one.engine.transport.route for one in collectives._engines.values()]


def test_a_fit_on_real_ranks_predicts_what_it_has_not_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Coarsely: the machine is busy during a test. benchmarks/cost_model.py has a bar."""
    monkeypatch.setattr(fit, "SIZES", (64 << 10, 2 << 20, 8 << 20))
    path = tmp_path / "profile.json"
    with World(2) as world:
        launcher = local_launcher(world)
        assert fit.run(launcher, 2, path) == 0
        for (route,) in world.run(routes):
            assert route.startswith("gloo: rank 0: ZCOMM_SHM=0")
        keys = [Key("all_reduce", spec) for spec in (OWN, "int4")]
        rows = list(rows_of(4 << 20, world.run(measure, 4 << 20, keys, 2, "gloo")))
    fitted = cost.load(path)
    assert set(fitted.codecs) == set(fit.SPECS)
    assert fitted.about["ranks"] == 2
    cluster = fit.cluster_of(2, fitted.bytes_per_s)
    ratio = predicted_s(fitted, rows[1], cluster) / min(rows[1].seconds)
    assert 0.1 < ratio < 10
    assert f"wrote {path}" in capsys.readouterr().out


def test_a_profile_is_read_as_it_was_written(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    cost.save(profile, path)
    assert cost.load(path) == profile


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "zcomm cost model 1"}'])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="written by `zcomm bench --fit`"):
        cost.load(path)


def test_a_profile_of_another_version_is_refused(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    cost.save(profile, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": "zcomm cost model 0"}))
    with pytest.raises(UsageError, match="written by `zcomm bench --fit`"):
        cost.load(path)


def test_codecs_with_other_options_cost_what_theirs_do(profile: Profile) -> None:
    assert profile.cost("topk:0.05") == profile.cost("topk:0.01")
    without = replace(profile, codecs={"int8": profile.codecs["int8"]})
    with pytest.raises(UsageError, match=r"expected codecs that the profile knows \(int8\)"):
        without.cost("lm4")


BUCKETS = 4
TRAINING = Workload(BUCKETS * BUCKET_NBYTES // 4, 4, 1.0, 0.5, shares_cores=False)


@pytest.mark.parametrize(
    ("comm_s", "exposed_s"),
    [(0.04, 0.01), (0.5, 0.125), (1.0, 1.0 - 0.375)],
    ids=["short: the last bucket", "as long as backward", "long: what backward cannot hide"],
)
def test_backward_hides_all_buckets_but_the_last(comm_s: float, exposed_s: float) -> None:
    sent = cost.Estimate(comm_s, comm_s, 0.0, 8)
    assert exposed_in_backward(TRAINING, sent) == pytest.approx(exposed_s)


def test_codecs_on_the_cores_that_compute_are_not_hidden() -> None:
    sent = cost.Estimate(0.2, 0.1, 0.2, 8)
    busy = TRAINING._replace(shares_cores=True)
    more = exposed_in_backward(busy, sent) - exposed_in_backward(TRAINING, sent)
    assert more == pytest.approx(0.2 * 3 / 4)


def test_parameters_are_gathered_after_backward(profile: Profile) -> None:
    cluster = Cluster(4, 1, 1, 2, 125 * MB)
    exact, coarse = (
        step_time(profile, TRAINING, Strategy(1, "lm4", gather), cluster)
        for gather in ("none", "lm4")
    )
    gathers = [
        cost.estimate(profile, "all_gather", TRAINING.numel, gather, cluster).s
        for gather in ("none", "lm4")
    ]
    assert exact.exposed_s - coarse.exposed_s == pytest.approx(gathers[0] - gathers[1])
    assert exact.step_s == TRAINING.step_s + exact.exposed_s
