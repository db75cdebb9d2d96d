"""`zcomm plan`, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zcomm
from zcomm import cli
from zcomm.engine.tuning import cost

ISSUE = (
    *("--params", "7e9", "--world", "64", "--hosts", "8", "--net", "10gbit"),
    *("--optimizer", "adamw", "--dtype", "bf16", "--step-time", "0.8"),
)
PAIR = ("--params", "25M", "--world", "2", "--step-time", "0.2")
SMALL = (*PAIR, "--net", "1gbit", "--codecs", "none", "int8", "lm4")
GB = 10**9


def planned(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "plan.json"
    cli.main(["plan", *arguments, "--json", str(path)])
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def by_name(values: dict[str, Any]) -> dict[str, Any]:
    return {row["name"]: row for row in values["rows"]}


def test_every_stage_and_codec_has_its_memory_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *ISSUE]) == 0
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in text
    for codec in ("none", "bf16", "int8", "int4", "lm4", "lm2", "sign", "topk:0.01"):
        for stage in ("DDP", "ZeRO"):
            rows = [line for line in lines if line[2:].startswith(f"{stage} {codec} ")]
            assert len(rows) == 2, (stage, codec)
    assert sum(line.startswith("* ") for line in lines) == 2
    assert "Times come from a model, not from measurements." in text
    assert "built in, fitted on" in text
    assert "The 8 ranks of a host first sum their gradients" in text


def test_a_step_time_that_is_assumed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--params", "1M", "--world", "2", "--codecs", "lm4"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "computes for 1.00 s (assumed; set --step-time)" in out


def test_memory_is_that_of_zcomm_plan(tmp_path: Path) -> None:
    rows = by_name(planned(tmp_path, *SMALL))
    for name, options in {
        "DDP alone": {"stage": 0, "codec": None},
        "DDP lm4": {"stage": 0, "codec": "lm4"},
        "ZeRO int8": {"stage": 1, "codec": "int8"},
        "ZeRO lm4+lm4": {"stage": 1, "codec": "lm4", "param_codec": "lm4"},
    }.items():
        memory = zcomm.plan(25e6, 2, **options)
        assert rows[name]["memory_bytes"]["peak"] == memory.peak
        assert rows[name]["memory_bytes"]["optimizer"] == memory.optimizer


def test_on_a_slow_line_compression_is_recommended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = planned(tmp_path, *SMALL)
    assert values["recommended"] == "DDP lm4"
    assert values["reason"] in capsys.readouterr().out
    times = {name: row["time_s"] for name, row in by_name(values).items()}
    assert times["DDP lm4"]["step_s"] < times["DDP int8"]["step_s"] < times["DDP none"]["step_s"]
    for time_s in times.values():
        assert time_s["step_s"] == pytest.approx(0.2 + time_s["exposed_s"])


def test_where_the_line_is_fast_what_loses_less_is_recommended(tmp_path: Path) -> None:
    values = planned(tmp_path, *SMALL, "--step-time", "100", "--spare-cores")
    assert values["recommended"] == "DDP alone"
    assert "within 2% of " in values["reason"]


def test_codecs_that_learn_badly_are_shown_and_not_recommended(tmp_path: Path) -> None:
    values = planned(tmp_path, *PAIR, "--net", "10mbit", "--codecs", "int8", "topk:0.01")
    times = {name: row["time_s"]["step_s"] for name, row in by_name(values).items()}
    assert min(times, key=lambda name: times[name]) == "DDP topk:0.01"
    assert "topk" not in values["recommended"]
    assert "DDP topk:0.01 would be faster" in values["reason"]


def test_rows_that_do_not_fit_are_not_recommended(tmp_path: Path) -> None:
    args = [*ISSUE, "--codecs", "lm4", "--hosts", "64"]
    anything, fitting = (planned(tmp_path, *args, *more) for more in ((), ("--memory", "50G")))
    assert anything["recommended"].startswith("DDP")
    assert fitting["recommended"].startswith("ZeRO")
    assert "of those that fit in 53.7 GB" in fitting["reason"]


def test_if_nothing_fits_it_says_what_needs_least(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *ISSUE, "--codecs", "lm4", "--memory", "8G"]) == 1
    assert "Nothing fits in 8.59 GB: ZeRO lm4" in capsys.readouterr().out


def test_a_profile_of_ones_own_decides_about_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    mine = replace(cost.load(cost.DEFAULT_PROFILE), latency_s=5.0)
    cost.save(replace(mine, about=mine.about | {"cpu": "Some Processor"}), path)
    without = by_name(planned(tmp_path, *SMALL, "--cores", "1"))
    capsys.readouterr()
    values = by_name(planned(tmp_path, *SMALL, "--cores", "1", "--profile", str(path)))
    slower = values["DDP lm4"]["time_s"]["step_s"] - without["DDP lm4"]["time_s"]["step_s"]
    assert slower == pytest.approx(5.0, rel=0.05)
    out = " ".join(capsys.readouterr().out.split())
    assert f"{path}, fitted on Some Processor" in out
    assert "built in" not in out


def test_thousands_of_ranks_are_planned_at_once(tmp_path: Path) -> None:
    started = time.process_time()
    values = planned(tmp_path, *ISSUE, "--world", "4096", "--hosts", "512", "--codecs", "lm4")
    assert time.process_time() - started < 10
    assert by_name(values)["ZeRO lm4"]["memory_bytes"]["optimizer"] == pytest.approx(
        56 * GB / 4096, rel=0.05
    )


def test_an_optimizer_that_zero_cannot_shard_is_planned_with_ddp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = planned(tmp_path, *SMALL, "--optimizer", "muon")
    assert [row["stage"] for row in values["rows"]] == [0, 0, 0, 0]
    out = " ".join(capsys.readouterr().out.split())
    assert "There are no rows for ZeRO" in out
    assert "Muon does not update element by element. Use it with zcomm.compress." in out


@pytest.mark.parametrize("world_size", ["100000", "1000000"])
def test_any_number_of_ranks_is_planned_at_once(world_size: str, tmp_path: Path) -> None:
    started = time.process_time()
    values = planned(tmp_path, "--params", "100", "--world", world_size)
    assert time.process_time() - started < 2
    assert len(values["rows"]) == 31


def test_the_compiler_is_not_imported() -> None:
    """It takes most of a second. Every step() of torch.optim imports it."""
    command = [sys.executable, "-X", "importtime", "-m", "zcomm", "plan", *ISSUE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "DDP alone" in done.stdout
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert "torch.optim" in imported
    assert not [name for name in imported if name.startswith("torch._dynamo")]


@pytest.mark.parametrize("name", ["latency_s", "bytes_per_s", "cores"])
def test_a_profile_with_nonsense_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    values = json.loads(cost.DEFAULT_PROFILE.read_text())
    path.write_text(json.dumps(values | {name: float("nan")}))
    assert cli.main(["plan", *SMALL, "--profile", str(path)]) == 2
    assert "a number that is not above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("--params 7x", "expected a number such as 7e9"),
        ("--world 10", "expected --world as a multiple of --hosts, got 10 ranks on 8 hosts"),
        ("--net fast", "expected a rate such as 1gbit"),
        ("--dtype fp64", "--dtype: expected one of fp32, bf16, fp16, got 'fp64'"),
        ("--optimizer adamv", "optimizer: expected one of"),
        ("--step-time 0", "expected --step-time from 1e-06 to 1,000,000, got 0"),
        ("--step-time nan", "got nan"),
        ("--step-time 1e300", "got 1e+300"),
        ("--backward-share 1.5", "expected --backward-share between 0 and 1, got 1.5"),
        ("--codecs lm5", "--codecs: codec: expected one of"),
        ("--memory lots", "expected a size such as 64K"),
        ("--cores -1", "expected --cores from 1 to 10,000,000, got -1"),
        ("--cores 0", "expected --cores from 1 to 10,000,000, got 0"),
        ("--world 0", "expected --world from 1 to 10,000,000, got 0"),
        (f"--world {10**30}", "expected --world from 1 to 10,000,000"),
        ("--hosts 0", "expected --hosts from 1 to 10,000,000, got 0"),
        ("--params 1e30", "expected a number such as 7e9, 7B or 350M, up to 1e15, got '1e30'"),
        ("--params 1e400", "got '1e400'"),
        ("--params nan", "got 'nan'"),
        ("--net 10Gbps", "expected a rate in bits, such as 10gbit, got '10Gbps'"),
        ("--net 1Gb/s", "write 1gbit"),
        (f"--memory {'9' * 400}", "expected a size such as 64K"),
        ("--memory=", "expected a size such as 64K"),
        ("--codecs none/lm4", "expected codecs of one hop, got 'none/lm4'"),
        ("--profile none.json", "expected a readable profile, got none.json"),
        ("--json no/such/plan.json", "expected a file in a folder that exists"),
        ("--json /proc/plan.json", "expected a file that can be written"),
    ],
)
def test_bad_arguments_get_a_sentence(
    change: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *ISSUE, *change.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("zcomm plan: ")
    assert says in captured.err
    assert captured.out == ""
