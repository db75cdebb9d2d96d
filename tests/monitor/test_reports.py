"""Where monitors report: log lines, TensorBoard, torch.profiler."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from monitored_training import WEIGHTS, Run
from ranks import OVER_GLOO, World
from zcomm.monitor import Log, TensorBoard

pytest_plugins = ["ddp_ranks"]


def logged(rank: int, world_size: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, options in {"rank 0": {}, "all": {"all_ranks": True}}.items():
        run = Run(feedback=True)
        found[name] = []
        Log(run.handle, 30, found[name].append, **options)
        run.steps(rank, 125)
        run.handle.close()
    return found


def test_log_is_a_line_now_and_then(pair: World) -> None:
    first, second = pair.run(logged)
    assert second["rank 0"] == []
    early, *_, late = first["rank 0"]
    for line, step in ((early, 30), (late, 120)):
        assert line.startswith(f"zcomm step {step}: ")
        words = ("ms", "exposed", "encode", "wait", "decode", "sent", "MB of", "x less")
        assert all(word in line for word in words), line
        assert "\n" not in line
    assert "gradient" not in early
    assert all(word in late for word in ("gradient", "error", "%", "residual"))
    assert [line.split(":")[0] for line in second["all"]] == [
        f"zcomm rank 1 step {step}" for step in (30, 60, 90, 120)
    ]


def log_by_default(rank: int, world_size: int, text: str) -> tuple[list[str], list[str]]:
    """What goes to stdout, and what goes to an existing handler."""
    path, run = Path(text, f"out{rank}"), Run()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(f"{record.name} {record.getMessage()[:11]}")
    logger = logging.getLogger("zcomm")
    Log(run.handle, every=1)
    with path.open("w") as sys.stdout:
        run.step(rank, 0)
        logger.addHandler(handler)
        run.step(rank, 1)  # below the log level
        logger.setLevel(logging.INFO)
        run.step(rank, 2)
    sys.stdout = sys.__stdout__
    logger.removeHandler(handler)
    run.handle.close()
    return [line[:12] for line in path.read_text().splitlines()], records


def test_log_goes_to_logging_or_where_there_is_none_to_stdout(pair: World, tmp_path: Path) -> None:
    (printed, records), other = pair.run(log_by_default, str(tmp_path))
    assert printed == ["zcomm step 1"]
    assert records == ["zcomm zcomm step "]
    assert other == ([], [])


class Writer:
    """Records what TensorBoard would write."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written.append((tag, value, step))


TOTALS = {
    *("ratio", "step_s", "raw_bytes", "wire_bytes", "shared_bytes"),
    *("encode_s", "wait_s", "decode_s", "exposed_s"),
    *("memory/parameters", "memory/residuals", "memory/buffers", "memory/core"),
}
NORMS = {"grad_norm", "residual_norm", "compression_error"}


def tensorboard(rank: int, world_size: int) -> list[tuple[str, float, int]]:
    run, writer = Run(feedback=True), Writer()
    TensorBoard(run.handle, writer if rank == 0 else None, every=2, layers_every=4)
    run.steps(rank, 4)
    run.handle.close()
    return writer.written


def test_tensorboard_writes_scalars(pair: World) -> None:
    written, others = pair.run(tensorboard)
    assert others == []
    tags = {step: {tag for tag, _, at in written if at == step} for step in (2, 4)}
    assert tags[2] == {f"zcomm/{name}" for name in TOTALS}
    layers = {f"layer/{name}/{figure}" for name in WEIGHTS for figure in NORMS}
    assert tags[4] >= {f"zcomm/{name}" for name in TOTALS | NORMS | layers}
    assert "zcomm/layer/first.bias/residual_norm" not in tags[4]
    assert len(written) == sum(map(len, tags.values()))


def event_file(rank: int, world_size: int, folder: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    run = Run(feedback=True)
    with SummaryWriter(folder) if rank == 0 else Log(run.handle) as writer:
        TensorBoard(run.handle, writer if rank == 0 else None, every=2, layers_every=4)
        run.steps(rank, 4)
    run.handle.close()


def test_tensorboard_reads_what_was_written(pair: World, tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pair.run(event_file, str(tmp_path))
    events = loader.EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in events.Scalars("zcomm/wire_bytes")] == [2, 4]
    (error,) = events.Scalars("zcomm/layer/middle.weight/compression_error")
    assert error.step == 4
    assert 0.05 < error.value < 0.15


def test_import_brings_no_tensorboard() -> None:
    code = "import sys, zcomm; zcomm.monitor.TensorBoard; sys.exit('tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=100).returncode == 0


# The profiler.

MAIN = {"zcomm::hook", "zcomm::exposed"}
ENGINE = {
    f"zcomm::{what}" for what in ("encode", "send", "wait", "decode_sum", "encode_own", "decode")
}


def profiled(rank: int, world_size: int, zero: bool, folder: str) -> list[dict[str, list[int]]]:
    """The ranges and their threads: with torch.profiler's defaults, and with all threads."""
    run, found = Run(zero=zero), []
    run.steps(rank, 2)
    for threads in (False, True):
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=threads)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, experimental_config=config) as profiler:
            run.steps(rank, 2)
        path = Path(folder, f"trace{rank}.json")
        profiler.export_chrome_trace(str(path))
        ranges: dict[str, set[int]] = {}
        for event in json.loads(path.read_text())["traceEvents"]:
            if event.get("name", "").startswith("zcomm::") and event["ph"] == "X":
                ranges.setdefault(event["name"], set()).add(event["tid"])
        found.append({name: sorted(threads) for name, threads in ranges.items()})
    run.handle.close()
    return found


@pytest.fixture(scope="module")
def over_gloo() -> Iterator[World]:
    with World(2, env=OVER_GLOO) as world:
        yield world


@pytest.mark.parametrize("zero", [False, True], ids=["compress", "ZeRO"])
@pytest.mark.parametrize(
    ("world", "engine"), [("pair", {"zcomm::exchange"}), ("over_gloo", ENGINE)]
)
def test_profiler_shows_ranges(
    request: pytest.FixtureRequest, tmp_path: Path, world: str, engine: set[str], zero: bool
) -> None:
    main = MAIN | ({"zcomm::gather_parameters"} if zero else set())
    # ZeRO waits for the parameters, and runs small jobs in shared memory itself.
    here = engine if zero and world == "pair" else set()
    for default, everything in request.getfixturevalue(world).run(profiled, zero, str(tmp_path)):
        assert set(default) == main | here
        assert set(everything) == main | engine
        (main_thread,) = {tid for name in main for tid in everything[name]}
        (engine_thread,) = {tid for name in engine for tid in everything[name]} - {main_thread}
        assert engine_thread != main_thread
