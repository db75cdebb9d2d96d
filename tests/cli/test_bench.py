"""`zcomm bench`, as a user types it: real ranks, small sizes."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zcomm
from ranks import OVER_GLOO, World
from zcomm import cli
from zcomm.cli.bench import command as bench
from zcomm.cli.bench.collective_rows import error_bound, is_wrong, rows_of, wire_nbytes
from zcomm.cli.bench.collective_tasks import Key, Timings, measure
from zcomm.engine.tuning.cost import KINDS, OWN
from zcomm.launch import machine
from zcomm.launch.launchers import LOOPBACK, Launcher

SIZE = 64 << 10
SMALL = ["--max-size", "64K", "--rounds", "1"]
# Any free port.
RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *RENDEZVOUS]


def zcomm_command(*arguments: str, folder: Path, start: list[str] | None = None) -> Any:
    """The command in its own process, with its output in a pipe."""
    line = [sys.executable, "-P", *(start or []), "-m", "zcomm", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=200)


def test_a_run_prints_tables_and_writes_files(tmp_path: Path) -> None:
    files = ["--json", "b.json", "--csv", "b.csv", "--html", "b.html"]
    sizes = ["--min", "16K", "--max", "70K", "--factor", "4", "--rounds", "2"]
    codecs = ["none", "int8:block=1024", "topk:0.01"]
    done = zcomm_command("bench", *sizes, "--codecs", *codecs, *files, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "\x1b" not in done.stdout
    assert "All 24 rows are correct in every round." in done.stdout

    written = json.loads((tmp_path / "b.json").read_text())
    keys = [(row["collective"], row["size_bytes"], row["codec"]) for row in written["rows"]]
    assert keys == [
        (kind, size, codec)
        for kind in KINDS
        for size in (16 << 10, 64 << 10)
        for codec in ("gloo", *codecs)
    ]
    assert written["about"]["ranks"] == 2
    with (tmp_path / "b.csv").open() as file:
        records = list(csv.DictReader(file))
    for row, record in zip(written["rows"], records, strict=True):
        assert {name: str(value) for name, value in row.items()} == record
        check_figures(row, own_s_of(row, written["rows"]))
    shown = [line.split() for line in lines if line.startswith(("16K", "64K"))]
    assert [cells[1] for cells in shown] == [row["codec"] for row in written["rows"]]

    page = (tmp_path / "b.html").read_text()
    assert page.count("<svg") == 2 * len(KINDS)
    assert "<script" not in page


def own_s_of(row: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    """The time of the backend's own collective, of the same kind and size."""
    names = ("collective", "size_bytes")
    same = [one for one in rows if all(one[name] == row[name] for name in names)]
    return float(next(one["time_s"] for one in same if one["codec"] == "gloo"))


def check_figures(row: dict[str, Any], own_s: float) -> None:
    assert row["wrong"] == 0
    assert row["fastest_s"] <= row["time_s"] <= row["slowest_s"]
    assert row["algbw_bytes_per_s"] == pytest.approx(row["size_bytes"] / row["time_s"])
    share = {"all_reduce": 1.0, "reduce_scatter": 0.5, "all_gather": 0.5}[row["collective"]]
    assert row["busbw_bytes_per_s"] == pytest.approx(share * row["algbw_bytes_per_s"])
    assert row["speedup"] == pytest.approx(own_s / row["time_s"])
    if row["codec"] == "gloo":
        assert row["speedup"] == 1
        assert row["wire_bytes"] == share * row["size_bytes"]


def test_the_usual_codecs_fit_80_columns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = cli.make_parser().parse_args(["bench", *SMALL, "--codecs", "lm4", "topk:0.01"])
    with World(2) as world:
        launcher = Launcher(world.run, 2, 2, LOOPBACK)
        assert bench.bench(launcher, bench.checked(args), args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80


def test_under_torchrun_rank_0_speaks(tmp_path: Path) -> None:
    arguments = ["bench", *SMALL, "--codecs", "int8", "--collectives", "all_reduce"]
    done = zcomm_command(*arguments, "--json", "b.json", folder=tmp_path, start=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert sum(line.startswith("64K") for line in done.stdout.splitlines()) == 2
    assert done.stdout.count("All 2 rows are correct") == 1
    assert json.loads((tmp_path / "b.json").read_text())["about"]["ranks"] == 2
    assert "may restart ranks" not in done.stderr  # without --max-restarts there is no danger


def test_under_torchrun_a_mistake_is_said_once(tmp_path: Path) -> None:
    done = zcomm_command("bench", "--ranks", "2", folder=tmp_path, start=TORCHRUN)
    assert done.returncode != 0
    assert done.stderr.count("expected no --ranks under torchrun") == 1


def test_hosts_with_shaped_links_and_several_ranks_on_each(tmp_path: Path) -> None:
    arguments = ["--collectives", "all_gather", "--codecs", "none/lm4", "--json", "b.json"]
    on_hosts = ["--hosts", "2", "--ranks", "2", "--rate", "500mbit/s"]
    done = zcomm_command("bench", *SMALL, *arguments, *on_hosts, folder=tmp_path)
    if "cannot emulate hosts" in done.stderr:
        assert done.returncode == 2
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert "all_gather, 4 ranks, 500mbit/s, gloo" in done.stdout
    assert json.loads((tmp_path / "b.json").read_text())["about"]["ranks"] == 4


@pytest.fixture(scope="module")
def samples() -> list[Timings]:
    keys = [Key(kind, codec) for kind in KINDS for codec in (OWN, "int8", "sign")]
    with World(2) as world:
        return world.run(measure, SIZE, keys, 2, "gloo")


def test_speed_agrees_with_time(samples: list[Timings]) -> None:
    """Of uneven rounds the median of their ratios would be 2."""
    seconds = {OWN: [1.0, 4.0, 6.0], "int8": [0.5, 8.0, 3.0]}
    one = {
        Key("all_reduce", codec): [
            samples[0][Key("all_reduce", codec)][0]._replace(s=s) for s in of
        ]
        for codec, of in seconds.items()
    }
    own, int8 = rows_of(SIZE, [one, one])
    assert (own.s, int8.s) == (4.0, 3.0)
    assert int8.speedup == pytest.approx(4 / 3)


def test_what_was_measured_is_right(samples: list[Timings]) -> None:
    rows = list(rows_of(SIZE, samples))
    assert len(rows) == 9
    assert all(row.wrong == 0 and len(row.seconds) == 2 for row in rows)
    assert all(row.error > 0 for row in rows if row.codec)


@pytest.mark.parametrize("error", [1.0, math.nan, math.inf])
def test_a_result_that_is_too_far_off_is_wrong(samples: list[Timings], error: float) -> None:
    key = Key("reduce_scatter", "int8")
    first, second = (one[key][0] for one in samples)
    assert not is_wrong(key, SIZE, (first, second))
    assert is_wrong(key, SIZE, (first, second._replace(error=error)))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_must_have_the_same_bits(samples: list[Timings], kind: str) -> None:
    key = Key(kind, "int8")
    first, second = (one[key][0] for one in samples)
    differ = (first, second._replace(digest=first.digest + 1))
    assert is_wrong(key, SIZE, differ) == (kind != "reduce_scatter")


def test_a_wrong_row_is_named_and_the_exit_code_is_1(
    samples: list[Timings], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(fn: Any, size: int, keys: list[Key], *_: Any) -> list[Timings]:
        spoiled = [{key: one[key] for key in keys} for one in samples]
        key = Key(keys[0].kind, "sign")
        spoiled[1][key] = [spoiled[1][key][0]._replace(error=2.0), spoiled[1][key][1]]
        return spoiled

    args = cli.make_parser().parse_args(["bench", *SMALL, "--codecs", "int8", "sign"])
    assert bench.bench(Launcher(run, 2, 2, LOOPBACK), bench.checked(args), args) == 1
    out = capsys.readouterr().out
    assert "WRONG: all_gather 64K sign: 1 of 2 rounds" in out
    assert "are right" not in out


def test_bounds_know_blocks_and_small_sizes() -> None:
    default, large = (error_bound(Key("all_gather", c), SIZE) for c in ("int8", "int8:block=1024"))
    assert 1.4 < large / default < 1.6
    assert error_bound(Key("all_gather", "int8"), 4096) > default
    assert error_bound(Key("all_reduce", "topk:0.01"), SIZE) == 1.0


def sent_by_engine(rank: int, world_size: int, key: Key, nbytes: int) -> int:
    """Runs on every rank: the bytes that the engine counted for one collective."""
    measure(rank, world_size, nbytes, [Key(key.kind, OWN), key], 0, "gloo")  # round 0 only
    (engine,) = zcomm.collectives._engines.values()
    before = engine.engine.counters.wire_bytes
    measure(rank, world_size, nbytes, [Key(key.kind, OWN), key], 0, "gloo")
    return engine.engine.counters.wire_bytes - before


@pytest.mark.parametrize("kind", KINDS)
def test_wire_bytes_are_those_that_the_engine_sends(kind: str) -> None:
    key = Key(kind, "lm4")
    with World(3, env=OVER_GLOO) as world:
        for nbytes in (SIZE, 20 << 20):
            sent = world.run(sent_by_engine, key, nbytes)
            assert sent[0] == wire_nbytes(key, nbytes, 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--min 64Q", "expected a size such as 64K"),
        ("--min 1M --max 64K", "expected --min up to --max, got 1M and 64K"),
        ("--min 1K", "expected --min of 4K or more"),
        ("--factor 1", "expected --factor of 2 or more, got 1"),
        ("--codecs lm9", "--codecs: codec: expected one of"),
        ("--codecs topk", "topk:0.01"),
        ("--codecs /lm4", "--codecs: codec: expected one of"),
        ("--collectives broadcast", "expected some of all_reduce, reduce_scatter, all_gather"),
        ("--backend nccl", "got 'nccl', which sends tensors of GPUs only"),
        ("--backend carrier-pigeon", "got 'carrier-pigeon', which is not in this torch"),
        ("--ranks 1", "expected at least 2 ranks, got 1"),
        ("--ranks 0", "expected --ranks from 1 to 250, got 0"),
        ("--ranks -2", "expected --ranks from 1 to 250, got -2"),
        ("--hosts 0", "expected --hosts from 1 to 250, got 0"),
        ("--hosts 1000", "expected --hosts from 1 to 250, got 1000"),
        ("--hosts 2 --ranks 0", "expected --ranks from 1 to 250, got 0"),
        ("--hosts 2 --ranks 2 --fit f.json", "expected one rank per host with --fit"),
        ("--rounds 0", "expected --rounds from 1 to 1,000,000, got 0"),
        (f"--max {'9' * 400}", "expected a size such as 64K"),
        ("--hosts 2 --rate 10Gbps", "expected a rate in bits, such as 10gbit, got '10Gbps'"),
        ("--hosts 2 --rate 1kbit", "from 1mbit to 1000tbit, got '1kbit'"),
        ("--rate 1gbit", "expected --hosts with --rate"),
        ("--hosts 2 --rate fast", "expected a rate such as 1gbit"),
        ("--max 64T", "GiB that are free here"),
        ("--json no/such/file.json", "expected a file in a folder that exists"),
        ("--fit profile.json --csv rows.csv", "expected --fit alone"),
    ],
)
def test_bad_arguments_get_a_sentence(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("zcomm bench: ")
    assert says in captured.err
    assert captured.out == ""


def test_memory_has_room_for_every_rank() -> None:
    free = machine.free_nbytes()
    machine.expect_memory(1000, 2, "--max 1K")
    with pytest.raises(cli.UsageError, match="choose a smaller size"):
        machine.expect_memory(free / 2, 2, "--max 1K")
