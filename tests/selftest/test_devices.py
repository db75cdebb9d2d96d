"""`python -m zcomm.selftest`: devices and options, and what needs ranks or a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from zcomm import kernels
from zcomm.conformance import gpu_tools
from zcomm.conformance.contract import Subject
from zcomm.kernels.reference import ReferenceKernels
from zcomm.report.finding import PROBLEM
from zcomm.selftest import command, engine, graphs, speed
from zcomm.selftest.tally import Scope, Tally

CPU = torch.device("cpu")


# Training.


def test_parameters_that_differ_are_named() -> None:
    training = engine._Training(0, 1, CPU, None)
    model = training._model()
    optimizer = training._sgd(model)
    for step in range(engine.STEPS):
        for name, p in model.named_parameters():
            p.grad = engine.exact_gradients(0, step)[name]
        optimizer.step()
    got = engine._parameters(model)
    assert training.compared("a way", got, "none", 0) == []
    got["narrow.weight"].view(-1).view(torch.int32)[7] ^= 1
    (fault,) = training.compared("a way", got, "none", 0)
    assert fault.startswith("a way: narrow.weight: 1 differ; at ")


def test_means_over_ranks_are_those_of_the_codec() -> None:
    grads = [engine.exact_gradients(rank, 0)["wide.weight"] for rank in (0, 1)]
    exact = (grads[0] + grads[1]) / 2
    assert torch.equal(engine._reduced(grads, "none", 2), exact)
    once, twice = (engine._reduced(grads, "lm4", hops) for hops in (1, 2))
    assert not torch.equal(once, exact)
    assert not torch.equal(once, twice)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_rank_that_fails_is_a_problem(capfd: pytest.CaptureFixture[str]) -> None:
    found = engine.check(Scope(Subject("cuda", torch.device("cuda", 0))))
    assert found.state == PROBLEM
    assert found.lines[0].startswith("1 rank failed: ")
    assert "Traceback" in found.details["faults"][0]
    assert capfd.readouterr() == ("", "")


def test_ranks_know_only_the_kernel_sets_of_zcomm(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(engine, "_faults", lambda *args: given.append(args) or [])
    assert "with the default kernels, not mine" in engine.check(Scope(Subject("mine"))).lines
    assert len(engine.check(Scope(Subject("cpu:scalar"))).lines) == 1
    env = [env for *_, env in given]
    assert env == [{}, {}, *[{"ZCOMM_KERNELS": "cpu:scalar"}] * 2]


# What only CUDA devices do, on stand-ins.


class Graph:
    """Replays what was called while it was captured."""

    def __init__(self) -> None:
        self.captured: list[graphs._Step] = []


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing: list[Graph] = []
    original = graphs._Step.run

    def step_run(step: graphs._Step) -> None:
        if capturing:
            capturing[0].captured.append(step)
        else:
            original(step)

    @contextmanager
    def capture(graph: Graph, stream: object) -> Iterator[None]:
        capturing.append(graph)
        yield
        capturing.clear()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            pass

        def wait_stream(self, other: Any) -> None:
            pass

    monkeypatch.setattr(graphs._Step, "run", step_run)
    monkeypatch.setattr(Graph, "replay", lambda g: [original(s) for s in g.captured], raising=False)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


@pytest.mark.usefixtures("stand_ins")
def test_replays_are_compared_with_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = Tally()
    graphs._check_replays(tally, "int8", Subject("cpu"))
    assert (tally.checks, tally.wrong) == (7, {})
    monkeypatch.setattr(Graph, "replay", lambda graph: None)
    graphs._check_replays(tally, "int8", Subject("cpu"))
    assert {fault.split(":")[0] for fault in tally.wrong["int8"]} == {
        f"{name} of replay {i}" for name in ("wire", "residual", "decoded") for i in (1, 2)
    }


def test_calls_on_a_device_are_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.seen = len(calls)

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return 3.0 * (other.seen - self.seen)  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    seconds = speed._seconds(lambda: calls.append(1), torch.device("cuda", 0))
    assert seconds == pytest.approx(0.003)
    assert len(calls) > 1


# Devices and options.


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "zcomm.selftest", "--device", "cuda"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("zcomm.selftest: --device cuda: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("cuda", "driver", "visible", "text"),
    [
        (None, None, None, "torch was built without CUDA ("),
        ("13.0", None, None, "no CUDA driver; install NVIDIA's driver"),
        ("13.0", "580.1", "7", "torch finds no GPU under CUDA_VISIBLE_DEVICES='7'; unset it"),
        ("13.0", "500.1", None, "torch for CUDA 13.0 finds no GPU with driver 500.1; compare"),
    ],
)
def test_the_reason_why_there_is_no_gpu(
    cuda: str | None,
    driver: str | None,
    visible: str | None,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_tools, "driver", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert command.main(["--device", "cuda:0"]) == 2
    assert f"zcomm.selftest: --device cuda:0: {text}" in capsys.readouterr().err


def test_a_gpu_without_kernels_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_tools, "absent", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(kernels.cuda, "missing", lambda ordinal=0: f"no code for GPU {ordinal}")
    kernels.register("none at all", ReferenceKernels())  # forgets what was selected before
    assert command.main(["--device", "cuda:1"]) == 2
    said = capsys.readouterr().err
    assert "zcomm.selftest: no kernels: cuda: no code for GPU 1; cupy: " in said
    assert "; triton: triton c" in said
    assert command.main(["--device", "cuda:2"]) == 2
    assert "--device: expected a number below 2, got cuda:2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--device", "tpu"], "--device: expected cpu, cuda or cuda:1, got 'tpu'"),
        (["--device", "mps"], "--device: expected cpu, cuda or cuda:1, got 'mps'"),
        (["--kernels", "nosuch"], "--kernels: expected one of reference, cpu"),
        (["--codecs", "int8,int9"], "--codecs: codec: expected one of none"),
        (["--parts", "contract,all"], "--parts: expected some of contract, layouts"),
        (["--json", "/nowhere/at/all.json"], "expected a file in a folder that exists"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_done_is_one_sentence(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--device", "cpu", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"zcomm.selftest: {text}")
