"""`zcomm demo`: a fair training, complete output, and nothing left behind."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from browser import chromium
from ranks import run_ranks
from zcomm import cli
from zcomm.cli.demo import command as demo_command
from zcomm.cli.demo import report as demo_report
from zcomm.cli.demo import training as demo_training
from zcomm.cli.demo.training import (
    CALIBRATION_STEPS,
    LEAST_STEPS,
    VARIANTS,
    Outcome,
    affordable_steps,
)
from zcomm.report import plot
from zcomm.report.progress import Progress, Standing

STEPS = 6
NAMES = [way.name for way in VARIANTS]


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "zcomm", "demo", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore Ctrl-C, and so do the processes that tests start there.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


class Demo:
    """A short demo, with its output in pipes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        options = ["--steps", str(STEPS), "--json", "d.json", "--svg", "d.svg"]
        process = start(folder, *options)
        self.out, self.err = process.communicate(timeout=240)
        assert process.returncode == 0, self.err
        self.json: dict[str, Any] = json.loads((folder / "d.json").read_text())
        self.ways: list[dict[str, Any]] = self.json["ways"]
        self.page = folder / "zcomm-demo.html"
        self.on_hosts = "an emulated host" in " ".join(self.err.split())


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return Demo(tmp_path_factory.mktemp("demo"))


def test_all_ways_start_alike_and_learn(demo: Demo) -> None:
    assert [way["way"] for way in demo.ways] == NAMES
    assert len({way["losses"][0] for way in demo.ways}) == 1
    for way in demo.ways:
        assert len(way["losses"]) == len(way["seconds"]) == STEPS
        assert way["losses"][-1] < way["losses"][0] - 0.5
        assert way["held_out"] == pytest.approx(demo.ways[0]["held_out"], rel=0.02)


def test_compression_and_sharding_save_what_they_should(demo: Demo) -> None:
    fp32, int8, lm4, zero = demo.ways
    nbytes = 4 * demo_training.parameter_count()
    assert fp32["sent"] >= nbytes
    if demo.on_hosts:  # on loopback other programs send, too
        for way, least in ((int8, 3.5), (lm4, 6.5), (zero, 6.5)):
            assert fp32["sent"] / way["sent"] > least
    assert fp32["optimizer_nbytes"] == int8["optimizer_nbytes"] == pytest.approx(2 * nbytes, 0.001)
    assert zero["optimizer_nbytes"] == pytest.approx(nbytes, rel=0.001)
    assert fp32["speedup"] == 1
    assert all(way["replicas_identical"] for way in demo.ways)


def test_the_table_fits_80_columns_and_has_no_control_codes(demo: Demo) -> None:
    rows = demo.out.splitlines()
    assert [row[:20].strip() for row in rows[:5]] == ["variant", *NAMES]
    assert "identical" in demo.out
    assert f"Report: {demo.page}" in demo.out
    said = [row for row in (*rows, *demo.err.splitlines()) if not row.startswith("Report: ")]
    assert max(map(len, said)) <= 80
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", demo.out + demo.err)


def test_progress_and_the_link_are_told_on_stderr(demo: Demo) -> None:
    assert demo.on_hosts or "this machine cannot emulate" in " ".join(demo.err.split())
    assert re.search(rf"^{STEPS}/{STEPS}( +\d\.\d+ +\d+/s){{4}}$", demo.err, re.MULTILINE)


def test_loopback_can_be_asked_for() -> None:
    link = demo_command.link_of(cli.make_parser().parse_args(["demo", "--loopback"]))
    assert link.rate is None
    assert "loopback interface, as requested" in link.words


def test_the_report_has_table_plots_machine_and_command(demo: Demo) -> None:
    page = demo.page.read_text()
    assert page.count("<svg") == 3
    for words in ("Loss over steps", "Loss over seconds", "Bytes on the network", "identical"):
        assert words in page
    assert f"zcomm demo --steps {STEPS} --json d.json --svg d.svg" in page
    assert str(demo.json["about"]["cpu"]) in page
    for way in demo.ways:
        assert f"{way['held_out']:.3f}" in page


def test_a_browser_shows_the_report(demo: Demo) -> None:
    document, console = chromium(demo.page)
    assert console == []
    assert document.count("<svg") == 3
    assert document.count('class="series-3"') == 5  # lines and legends of two plots, and a bar


def test_the_picture_is_the_plots_side_by_side(demo: Demo) -> None:
    picture = ElementTree.fromstring((demo.folder / "d.svg").read_text())
    assert len(picture.findall(".//{http://www.w3.org/2000/svg}svg")) == 3
    assert float(picture.attrib["width"]) > 3 * plot.WIDTH


def rank_processes(parent: int) -> list[str]:
    """The command lines of ranks that a demo started and that still run."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended meanwhile
            continue
    return [line for line in lines if f"rank_process {parent} " in line]


def namespaces(parent: int) -> list[str]:
    return [path.name for path in Path("/run/netns").glob(f"zcomm-{parent}-*")]


def test_ctrl_c_leaves_no_process_and_no_network(tmp_path: Path) -> None:
    process = start(tmp_path, "--steps", "100000")  # as root with hosts, if they are possible
    assert process.stderr
    seen = ""
    for line in process.stderr:
        seen += line
        if re.match(r"\d+/100000 ", line):
            break
    assert len(rank_processes(process.pid)) == 2, seen
    assert len(namespaces(process.pid)) == (3 if "emulated host" in " ".join(seen.split()) else 0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "zcomm demo: stopped"
    assert rank_processes(process.pid) == []
    assert namespaces(process.pid) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--steps", "0"], "--steps from 1 to 1000000, got '0'"),
        (["--steps", "9" * 400], "--steps from 1 to 1000000"),
        (["--json", ""], "in a folder that exists"),
        (["--rate", ""], "got ''"),
        (["--rate", "1gbps"], "write 1gbit"),
        (["--steps", "many"], "got 'many'"),
        (["--seconds", "5"], "--seconds from 20 to 1000000, got '5'"),
        (["--seconds", "soon"], "got 'soon'"),
        (["--seconds", "nan"], "got 'nan'"),
        (["--html", "no/such/folder/x.html"], "got no/such/folder/x.html"),
        (["--svg", "/"], "exists, got /"),
        (["--rate", "fast"], "from 1mbit to 1000tbit, got 'fast'"),
    ],
)
def test_bad_options_get_a_sentence(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("zcomm demo: ")
    assert says in said.err
    assert said.err.count("\n") == 1


def different_clocks(rank: int, world_size: int) -> int:
    return affordable_steps(12, step_s=1.0, end=time.monotonic() + 116.5 - 50 * rank)


def test_all_ranks_train_as_long_as_rank_0_says() -> None:
    # 10.7 s are reserved for the held-out text: 32 batches per rank, a third of a step each.
    assert run_ranks(2, different_clocks) == [117, 117]


def test_calibration_does_not_change_the_learning_rate() -> None:
    for step in range(CALIBRATION_STEPS):
        rates = {demo_training.lr_factor(step, steps) for steps in (LEAST_STEPS, 100, 1000)}
        assert len(rates) == 1


def outcome(digest: str) -> Outcome:
    return Outcome([3.0, 2.0], [0.1, 0.1], [1e6], 2.0, 8, digest)


def test_replicas_that_differ_are_reported() -> None:
    first = [outcome("same") for _ in VARIANTS]
    second = [*first[:-1], outcome("other")]
    result = demo_report.Result([first, second], link="", on_loopback=True, command="", total_s=1.0)
    assert not result.identical
    assert result.replicas().startswith(f"The replicas DIFFER: {NAMES[-1]}.")
    assert "DIFFER" in result.page()


@pytest.fixture
def terminal() -> Iterator[tuple[io.TextIOWrapper, int]]:
    """Both sides of an 80-column terminal: the program's, and ours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with open(theirs, "w", encoding="utf-8") as stream:
        yield stream, ours
    os.close(ours)


def lines_from(terminal: int, count: int) -> list[str]:
    said = b""
    while said.count(b"\n") < count:
        said += os.read(terminal, 10_000)
    assert said.count(b"\n") == count
    return said.decode().splitlines()


def test_on_a_terminal_progress_is_drawn_in_place(
    terminal: tuple[io.TextIOWrapper, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream, other_side = terminal
    progress = Progress(NAMES, stream)
    fast, slow = Standing(2.5, 4000.0), Standing(2.5, 1000.0)
    progress.show(0, None, [slow, None, None, None])
    assert "measuring" in lines_from(other_side, 5)[0]
    progress.show(50, 100, [slow, fast, fast, fast])
    drawn = lines_from(other_side, 5)
    assert drawn[0].startswith("\x1b[5A\x1b[Jstep 50 of 100")
    plain = [re.sub(r"\x1b\[[\d;]*[AJm]", "", row) for row in drawn]
    assert max(map(len, plain)) <= 79
    assert [row.count("▇") for row in plain[1:]] == [7, 29, 29, 29]
    assert plain[1].startswith("DDP fp32              loss 2.500")
    assert plain[1].endswith("1,000 tokens/s")


def test_in_a_file_progress_is_plain_lines() -> None:
    stream = io.StringIO()
    progress = Progress(NAMES, stream)
    same = [Standing(2.5, 1000.0)] * len(NAMES)
    for done in (4, 8, 12):  # too soon after each other for more than one
        progress.show(done, 12, same)
    rows = stream.getvalue().splitlines()
    assert [row.split()[0] for row in rows] == ["Loss", "step", "4/12", "12/12"]
    assert max(map(len, rows)) <= 80
