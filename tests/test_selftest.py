"""`python -m zcomm.selftest`: right kernels pass, each kind of wrong one is found and named."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
from zcomm import contract, kernels
from zcomm.cli import gpu_tools
from zcomm.cli.finding import NOTE, OK, PROBLEM
from zcomm.contract import Subject
from zcomm.kernels.cpu import CpuKernels
from zcomm.kernels.cuda import CudaKernels
from zcomm.selftest import command, engine, graphs, speed
from zcomm.selftest.tally import Plan, Tally
from zcomm.wire import WireError

CPU = torch.device("cpu")


def run(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the report."""
    file = tmp_path / "report.json"
    code = command.main(["--device", "cpu", "--quick", "--json", str(file), *options])
    return code, json.loads(file.read_text())


def test_the_cpu_is_right_and_the_report_has_all_parts(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    options = ["--device", "cpu", "--quick", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "zcomm.selftest", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.endswith("\nall is right\n")
    report = json.loads(file.read_text())
    assert report["right"] is True
    assert report["environment"]["kernels"].startswith("cpu:")
    assert report["environment"]["torch"].startswith(torch.__version__)
    parts = report["parts"]
    assert list(parts) == list(command.PARTS)
    assert {name: part["state"] for name, part in parts.items()} == {
        **dict.fromkeys(parts, OK),
        "graph": NOTE,
    }
    codecs = len(contract.SPECS)
    # Wire, residual and decoded values of each case, and sums of two kinds of wires.
    assert parts["contract"]["checks"] == codecs * (3 * 4 * 6 * 3 + 9 + 10)
    assert parts["damage"]["checks"] > 40 * codecs
    assert parts["vectors"]["vectors"] > codecs
    assert parts["engine"]["two_ranks"] is True
    assert set(parts["speed"]["calls"]) >= set(contract.NAMES)
    assert all(name in done.stdout for name in (*command.PARTS, "GB/s", *contract.NAMES))
    assert list(tmp_path.iterdir()) == [file]


# Kernel sets that are wrong in one way, for lm4 alone.


class WrongKernels(CpuKernels):
    def __init__(self) -> None:
        super().__init__("scalar")
        self.name = type(self).__name__

    def encode(self, layout: Any, grad: Any, residuals: Any, wire: Tensor, *rest: Any) -> None:
        super().encode(layout, grad, residuals, wire, *rest)
        if layout.numel and layout.segments[0].codec.name == "lm4":
            self.spoil(wire, residuals, grad)

    def spoil(self, wire: Tensor, residuals: Any, grad: Tensor) -> None:
        pass


class OneWireBit(WrongKernels):
    def spoil(self, wire: Tensor, residuals: Any, grad: Tensor) -> None:
        wire[-1] ^= 1


class OneResidualBit(WrongKernels):
    def spoil(self, wire: Tensor, residuals: Any, grad: Tensor) -> None:
        if residuals is not None:
            residuals.outputs[0].view(torch.int8)[0] ^= 1


class WritesBehind(WrongKernels):
    def spoil(self, wire: Tensor, residuals: Any, grad: Tensor) -> None:
        ctypes.memset(wire.data_ptr() + wire.numel(), 0, 1)


class ChangesTheGradient(WrongKernels):
    def spoil(self, wire: Tensor, residuals: Any, grad: Tensor) -> None:
        grad.view(torch.int8)[0] ^= 1


class Raises(WrongKernels):
    def spoil(self, wire: Tensor, residuals: Any, grad: Tensor) -> None:
        raise RuntimeError("an illegal memory access was encountered")


class AcceptsDamage(WrongKernels):
    def decode_sum(self, layout: Any, wires: Any, out: Any, *rest: Any, **more: Any) -> None:
        try:
            super().decode_sum(layout, wires, out, *rest, **more)
        except WireError:
            if layout.segments[0].codec.name != "lm4":
                raise


class NamesAnotherWire(WrongKernels):
    def decode_sum(self, layout: Any, wires: Any, out: Any, *rest: Any, **more: Any) -> None:
        try:
            super().decode_sum(layout, wires, out, *rest, **more)
        except WireError as error:
            wrong = layout.segments[0].codec.name == "lm4"
            raise WireError(str(error), (error.wire_index or 0) + wrong) from None


class AddsInAnotherOrder(WrongKernels):
    def decode_sum(self, layout: Any, wires: Any, out: Any, *rest: Any, **more: Any) -> None:
        if layout.segments[0].codec.name == "lm4":
            wires = wires[::-1]
        super().decode_sum(layout, wires, out, *rest, **more)


@pytest.mark.parametrize(
    ("wrong", "part", "text"),
    [
        (OneWireBit, "contract", "wire, torch.float32 gradient, None residual"),
        (OneWireBit, "layouts", "wire, 1 segments"),
        (OneResidualBit, "contract", "residual, torch.float32 gradient, torch.float32 residual"),
        (OneResidualBit, "layouts", "residual, 1 segments"),
        (WritesBehind, "contract", "expected no writes outside the tensors"),
        (ChangesTheGradient, "contract", "gradient after encode: 1 differ"),
        (Raises, "contract", "RuntimeError: an illegal memory access"),
        (AcceptsDamage, "damage", "expected the wire to be refused, got its values"),
        (NamesAnotherWire, "damage", "expected wire 0 to be refused, got wire 0: expected"),
        (AddsInAnotherOrder, "contract", "sum of 3 wires of 1153 elements"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_wrong_kernels_are_found_and_the_codec_is_named(
    wrong: type[WrongKernels], part: str, text: str, tmp_path: Path, capsys: Any
) -> None:
    kernels.register(wrong.__name__, wrong())
    options = ["--kernels", wrong.__name__, "--codecs", "int8,lm4", "--parts", part]
    code, report = run(tmp_path, *options)
    out = capsys.readouterr().out
    assert (code, report["right"]) == (1, False)
    found = report["parts"][part]
    assert found["state"] == PROBLEM
    assert set(found["wrong"]) == {"lm4"}
    assert 0 < found["wrong"]["lm4"] < found["checks"]
    assert any(fault.startswith("lm4: ") and text in fault for fault in found["first"])
    assert "\nproblem  " in out
    assert "lm4: " in out
    assert out.endswith("Do not train with these kernels on this device, and send this report.\n")


def test_wrong_kernels_do_not_make_the_vectors(tmp_path: Path) -> None:
    kernels.register("OneWireBit", OneWireBit())
    code, report = run(tmp_path, "--kernels", "OneWireBit", "--parts", "vectors")
    assert code == 1
    assert report["parts"]["vectors"]["wrong"]
    assert all(text.startswith("lm4 of") for text in report["parts"]["vectors"]["wrong"])


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
    found = engine.check(Plan(Subject("cuda", torch.device("cuda", 0))))
    assert found.state == PROBLEM
    assert found.lines[0].startswith("1 rank failed: ")
    assert "Traceback" in found.details["faults"][0]
    assert capfd.readouterr() == ("", "")


def test_ranks_know_only_the_kernel_sets_of_zcomm(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(engine, "_faults", lambda *args: given.append(args) or [])
    assert "with the default kernels, not mine" in engine.check(Plan(Subject("mine"))).lines
    assert len(engine.check(Plan(Subject("cpu:scalar"))).lines) == 1
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
    monkeypatch.setattr(kernels.cuda, "missing", lambda: "no CUDA driver")
    kernels.register("none at all", OneWireBit())  # forgets what was selected before
    assert command.main(["--device", "cuda:1"]) == 2
    assert "--kernels: kernels cuda are absent: no CUDA driver" in capsys.readouterr().err
    assert command.main(["--device", "cuda:2"]) == 2
    assert "--device: expected a number below 2, got cuda:2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--device", "tpu"], "--device: expected cpu, cuda or cuda:1, got 'tpu'"),
        (["--device", "mps"], "--device: expected cpu, cuda or cuda:1, got 'mps'"),
        (["--kernels", "nosuch"], "--kernels: kernels: expected one of reference, cpu"),
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


# The CUDA kernels themselves, on the emulator.


@pytest.mark.skipif(emulated.NVCC is None, reason=emulated.NO_NVCC)
def test_the_kernels_ptx_passes(tmp_path: Path) -> None:
    module = emulated.load(emulated.Build(arch=80))
    kernels.register("emulated", CudaKernels(module, "emulated"))
    options = ["--kernels", "emulated", "--codecs", "none,int8,int4:block=512,lm4,sign,topk:0.01"]
    code, report = run(tmp_path, *options, "--parts", "contract,layouts,damage,vectors")
    assert code == 0, report
    assert report["environment"]["kernels"] == "emulated"
    assert report["parts"]["contract"]["checks"] == 6 * (3 * 4 * 6 * 3 + 9 + 10)
