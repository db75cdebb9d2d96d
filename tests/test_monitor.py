"""Monitors: their figures are true, they change no bit, and they keep nothing alive."""

from __future__ import annotations

import copy
import gc
import json
import logging
import math
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import Branches, Mixed, Net, assert_bit_equal, batch, in_memory_order, seeded
from raised import raised
from ranks import World, run_ranks
from zcomm.monitor import Callback, Log, Sample, TensorBoard

pytest_plugins = ["ddp_ranks"]

CODECS = ("none", "bf16", "fp16", "int8", "fp8", "int4", "lm4", "lm3", "lm2", "sign", "topk:0.02")
WEIGHTS = ("first.weight", "middle.weight", "last.weight")
# What sums of fp32 in another order may differ by.
ROUNDING = 1e-5


class Run:
    """A small model in training, by zcomm.compress and SGD or by ZeroOptimizer."""

    def __init__(
        self,
        model: Any = Net,
        zero: bool = False,
        codec: Any = "lm4",
        ddp: Any = None,
        **given: Any,
    ) -> None:
        self.ddp = DistributedDataParallel(seeded(model), **(ddp or {"bucket_cap_mb": 0.1}))
        self.owner: Any
        if zero:
            self.owner = zcomm.ZeroOptimizer(self.ddp, optim.AdamW, None, codec, **given)
            self.handle, self.optimizer = self.owner.handle, self.owner
        else:
            self.owner = self.handle = zcomm.compress(self.ddp, codec, **given)
            self.optimizer = optim.SGD(self.ddp.parameters(), lr=0.5)

    def step(self, rank: int, number: int) -> None:
        self.optimizer.zero_grad()
        self.backward(rank, number)
        self.optimizer.step()

    def backward(self, rank: int, number: int) -> None:
        self.ddp(batch(rank, number)).float().square().mean().backward()

    def steps(self, rank: int, count: int) -> None:
        for number in range(count):
            self.step(rank, number)

    def bits(self) -> dict[str, Any]:
        parameters = {name: p.detach().clone() for name, p in self.ddp.named_parameters()}
        return {"parameters": parameters, "residuals": self.handle.state_dict()["residuals"]}


def local_gradients(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """This rank's own gradients of the backward() that was last, in the order of memory."""
    found: dict[str, Tensor] = {}
    for name, p in ddp.module.named_parameters():
        p.register_hook(lambda g, n=name, p=p: found.update({n: in_memory_order(g, p).clone()}))
    return found


def close_to(value: float | None, expected: float) -> bool:
    return value is not None and math.isclose(value, expected, rel_tol=ROUNDING)


# No bit changes.


def feedbacks(codec: str) -> tuple[bool | float, ...]:
    return (0.8, True) if codec in ("sign", "topk:0.02") else (False, True)


def watched_bits(rank: int, world_size: int, codec: str, zero: bool) -> list[bool]:
    """Of runs with and without monitors on rank 0."""
    same = []
    for feedback in feedbacks(codec):
        found = []
        for watched in (False, True):
            run = Run(Mixed, zero, codec, feedback=feedback, min_numel=0)
            if watched and rank == 0:
                samples: list[Sample] = []
                Callback(run.owner, samples.append, every=1, layers_every=2)
                Log(run.owner, every=3, write=str)
            run.steps(rank, 4)
            found.append(run.bits())
            run.handle.close()
        assert rank or [bool(s.layers) for s in samples] == [False, True, False, True]
        assert_bit_equal(*found)
        same.append(True)
    return same


@pytest.mark.parametrize("zero", [False, True], ids=["compress", "ZeRO"])
@pytest.mark.parametrize("codec", CODECS)
def test_monitors_on_one_rank_change_no_bit(pair: World, codec: str, zero: bool) -> None:
    assert pair.run(watched_bits, codec, zero) == [[True, True]] * 2


# The figures.


def figures_against_state(rank: int, world_size: int, codec: str, feedback: Any) -> dict[str, Any]:
    """Each weight's figures, and the same from gradients and saved residuals."""
    run = Run(codec=codec, feedback=feedback)
    gradients = local_gradients(run.ddp)
    samples: list[Sample] = []
    Callback(run.handle, samples.append, every=1, layers_every=3)
    run.steps(rank, 2)
    before = run.handle.state_dict()["residuals"]["sent"]
    run.step(rank, 2)
    after = run.handle.state_dict()["residuals"]["sent"]
    found = {}
    for name in WEIGHTS:
        old, new = before[name].double(), after[name].double()
        decay = 0.0 if feedback is True else feedback
        x, left = gradients[name] / world_size + old, (new - decay * old) / (1 - decay)
        layer = samples[-1].layers[name]
        found[name] = (
            (layer.grad_norm, gradients[name].norm().item()),
            (layer.residual_norm, new.norm().item()),
            (layer.compression_error, (left.norm() / x.norm()).item()),
        )
    run.handle.close()
    return found


@pytest.mark.parametrize("feedback", [True, 0.5])
@pytest.mark.parametrize("codec", CODECS[1:])
def test_figures_are_those_of_gradients_and_residuals(
    pair: World, codec: str, feedback: Any
) -> None:
    for found in pair.run(figures_against_state, codec, feedback):
        for name, figures in found.items():
            for got, expected in figures:
                assert expected > 0, name
                assert close_to(got, expected), (name, got, expected)


def figures_without_feedback(rank: int, world_size: int) -> dict[str, list[bool]]:
    found: dict[str, list[bool]] = {}
    for spec in ("bf16", "int8", "int4"):  # whose blocks do not depend on pieces
        run, codec = Run(codec=spec, feedback=False), zcomm.codec(spec)
        gradients = local_gradients(run.ddp)
        samples: list[Sample] = []
        Callback(run.handle, samples.append, layers_every=2)
        run.steps(rank, 2)
        (sample,) = samples
        for name in WEIGHTS:
            x = gradients[name].float() / world_size
            error = (x - codec.decode(codec.encode(x), x.numel())).norm() / x.norm()
            layer = sample.layers[name]
            same = layer.residual_norm is None and 0 < error.item() < 0.3
            found.setdefault(spec, []).append(
                same and math.isclose(layer.compression_error, error.item(), rel_tol=1e-4)
            )
        found[spec].append(sample.layers["first.bias"].compression_error == 0)
        whole = math.hypot(*(layer.grad_norm for layer in sample.layers.values()))
        found[spec].append(close_to(sample.grad_norm, whole))
        run.handle.close()
    return found


def test_error_without_feedback_is_that_of_one_encoding(pair: World) -> None:
    for found in pair.run(figures_without_feedback):
        assert found == dict.fromkeys(("bf16", "int8", "int4"), [True] * 5)


def mixed_dtypes(rank: int, world_size: int, zero: bool) -> dict[str, Any]:
    run = Run(Mixed, zero, "int8", feedback=True, start_step=2, residual_dtype="int8")
    gradients = local_gradients(run.ddp)
    samples: list[Sample] = []
    Callback(run.owner, samples.append, layers_every=1)
    run.steps(rank, 3)
    run.handle.close()
    warm, *_, last = samples
    return {
        "norms": [
            close_to(last.layers[n].grad_norm, g.norm().item()) for n, g in gradients.items()
        ],
        "warm": {layer.compression_error for layer in warm.layers.values()},
        "errors": {n: layer.compression_error for n, layer in last.layers.items()},
        "residuals": {n for n, layer in last.layers.items() if layer.residual_norm},
    }


@pytest.mark.parametrize("zero", [False, True], ids=["compress", "ZeRO"])
def test_what_goes_uncompressed_has_no_error(pair: World, zero: bool) -> None:
    for found in pair.run(mixed_dtypes, zero):
        assert found["norms"] == [True] * 6
        assert found["warm"] == {0.0}
        lossy = {name for name, error in found["errors"].items() if error}
        assert lossy == found["residuals"] == {"single.weight", "brief.weight"}
        assert all(error < 0.02 for error in found["errors"].values())


def unused_layer(rank: int, world_size: int) -> list[Any]:
    run = Run(Branches, ddp={"find_unused_parameters": True}, feedback=True)
    samples: list[Sample] = []
    Callback(run.handle, samples.append, layers_every=1)
    run.step(rank, 0)
    run.ddp.module.branch = "middle"
    run.step(rank, 1)
    run.handle.close()
    return [s.layers["other.weight"] for s in samples]


def test_unused_layer_keeps_its_residual_and_sends_nothing(pair: World) -> None:
    for used, unused in pair.run(unused_layer):
        assert used.residual_norm == unused.residual_norm > 0
        assert unused.grad_norm == 0
        assert unused.compression_error == 1


def scaled_figures(rank: int, world_size: int) -> list[Sample]:
    found: list[Sample] = []
    for scale in (None, 1024.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else None
        run = Run(feedback=True, scaler=scaler)
        Callback(run.handle, found.append, every=2, layers_every=2)
        for number in range(2):
            loss = run.ddp(batch(rank, number)).square().mean()
            (scaler.scale(loss) if scaler else loss).backward()
            run.optimizer.zero_grad()
        run.handle.close()
    return found


def test_norms_are_without_the_loss_scale(pair: World) -> None:
    for plain, scaled in pair.run(scaled_figures):
        for name, layer in plain.layers.items():
            other = scaled.layers[name]
            assert close_to(other.grad_norm, layer.grad_norm)
            assert close_to(other.compression_error, layer.compression_error) or name[-1] == "s"
            if layer.residual_norm is not None:
                assert close_to(other.residual_norm, layer.residual_norm)


def spoiled_figures(rank: int, world_size: int) -> Any:
    run = Run(codec={"first.weight": "none", "*": "int8"})
    run.ddp.module.first.weight.register_hook(lambda g: torch.full_like(g, math.inf))
    run.ddp.module.middle.weight.register_hook(lambda g: torch.full_like(g, math.nan))
    samples: list[Sample] = []
    Callback(run.handle, samples.append, layers_every=1)
    run.step(rank, 0)
    run.handle.close()
    return {name: samples[0].layers[name] for name in WEIGHTS}


def test_gradients_that_are_not_finite_are_reported_as_such(pair: World) -> None:
    for found in pair.run(spoiled_figures):
        exact, lossy, intact = (found[name] for name in WEIGHTS)
        assert (exact.grad_norm, exact.compression_error) == (math.inf, 0)
        assert math.isnan(lossy.grad_norm)
        assert math.isnan(lossy.compression_error)
        assert 0 < intact.compression_error < 0.02


# Samples.


def totals(rank: int, world_size: int, zero: bool) -> Any:
    """Which steps are sampled; each sample's totals, and those of the handle; the bytes' ratio."""
    run = Run(zero=zero, **({"param_codec": "lm4"} if zero else {}))
    run.steps(rank, 1)
    seen: list[tuple[Sample, Any]] = []
    before = run.handle.stats()
    Callback(run.owner, lambda s: seen.append((s, run.handle.stats())), every=3, layers_every=4)
    run.steps(rank, 9)
    compared = []
    for sample, after in seen:
        for name in ("raw_bytes", "wire_bytes", "encode_s", "wait_s", "decode_s", "exposed_s"):
            expected = getattr(after, name) - getattr(before, name)
            compared.append((getattr(sample, name) * sample.steps, expected))
        before = after
    run.handle.close()
    return [(s.step, s.steps, bool(s.layers)) for s, _ in seen], compared, seen[0][0].ratio


@pytest.mark.parametrize("zero", [False, True], ids=["compress", "ZeRO"])
def test_samples_add_up_to_the_totals(pair: World, zero: bool) -> None:
    for sampled, compared, ratio in pair.run(totals, zero):
        assert sampled == [(3, 2, False), (4, 1, True), (6, 2, False), (8, 2, True), (9, 1, False)]
        assert 6 < ratio < 8
        for got, expected in compared:
            assert expected > 0
            assert math.isclose(got, expected)


def memory(rank: int, world_size: int, by_handle: bool) -> Any:
    run = Run(Mixed, True, "lm4", param_codec="lm4", feedback=True)
    samples: list[Sample] = []
    Callback(run.handle if by_handle else run.owner, samples.append, every=2)
    run.steps(rank, 1)
    run.backward(rank, 1)
    state = run.optimizer.inner.state.values()
    expected = {
        "parameters": sum(p.nbytes for p in run.ddp.parameters()),
        "residuals": run.handle.residual_nbytes(),
        "buffers": run.handle.buffer_nbytes(),
        "optimizer": sum(v.nbytes for s in state for v in s.values()),
        "masters": sum(s.tensor.nbytes for s in run.optimizer.shards.values() if s.has_master),
    }
    run.handle.close()
    return samples[0].memory, expected


@pytest.mark.parametrize("by_handle", [False, True], ids=["ZeroOptimizer", "its handle"])
def test_memory_is_that_of_the_rank(pair: World, by_handle: bool) -> None:
    for found, expected in pair.run(memory, by_handle):
        assert {name: getattr(found, name) for name in expected} == expected
        assert all(expected.values())
        assert found.core > 0


def alone(rank: int, world_size: int) -> Sample:
    run, samples = Run(feedback=True), []
    Callback(run.handle, samples.append, layers_every=1)
    run.step(rank, 0)
    return samples[0]


def test_one_rank_sends_nothing_and_loses_nothing() -> None:
    (sample,) = run_ranks(1, alone)
    assert sample.wire_bytes == sample.compression_error == 0
    assert math.isnan(sample.ratio)
    assert "ratio" not in sample.scalars()
    assert all(layer.grad_norm > 0 for layer in sample.layers.values())
    assert sample.memory.optimizer is None


def joined(rank: int, world_size: int) -> list[int]:
    run, samples = Run(feedback=True), []
    Callback(run.handle, samples.append, every=1, layers_every=2)
    with Join([run.ddp]):
        run.steps(rank, 2 + 4 * rank)
    run.handle.close()
    return [s.step for s in samples]


def test_rank_that_has_run_out_of_data_is_monitored(pair: World) -> None:
    assert pair.run(joined) == [[1, 2, 3, 4, 5, 6]] * 2


# Errors.


class Failing:
    """A callback that raises at its second call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, sample: Sample) -> None:
        self.calls += 1
        if self.calls == 2:
            raise KeyError("planted")


def failing_callback(rank: int, world_size: int, zero: bool) -> list[str]:
    run, plain, fail = Run(zero=zero), Run(zero=zero), Failing()
    if rank == 0:
        Callback(run.owner, fail, every=1)
    found = []
    for number in range(4):
        run.optimizer.zero_grad()
        found.append(raised(run.backward, rank, number).type)
        run.optimizer.step()
    plain.steps(rank, 4)
    assert_bit_equal(run.bits(), plain.bits())
    for one in (run, plain):
        one.handle.close()
    assert fail.calls == (4 if rank == 0 else 0)
    return found


@pytest.mark.parametrize("zero", [False, True], ids=["compress", "ZeRO"])
def test_error_of_a_callback_is_raised_by_backward_and_training_goes_on(
    pair: World, zero: bool
) -> None:
    none = "NoneType"
    assert pair.run(failing_callback, zero) == [[none, "KeyError", none, none], [none] * 4]


def measure_badly(rank: int, world_size: int) -> list[str]:
    """An error before a bucket is handed over, where DDP would be left broken."""
    run, samples = Run(), []
    with Callback(run.handle, samples.append, every=1, layers_every=1) as monitor:
        monitor._new_figures = lambda: 1 / 0
        found = [raised(run.backward, rank, 0).type]
    found.append(raised(run.backward, rank, 1).type)
    run.handle.close()
    return found


def test_error_of_a_monitor_leaves_ddp_whole(pair: World) -> None:
    assert pair.run(measure_badly) == [["ZeroDivisionError", "NoneType"]] * 2


REFUSED = {
    "handle: expected what zcomm.compress returned, or a zcomm.ZeroOptimizer, got Linear": (
        lambda: Log(torch.nn.Linear(1, 1))
    ),
    "expected every >= 1, got 0": lambda: Log(None, every=0),
    "expected layers_every >= 1, got -1": lambda: Callback(None, print, layers_every=-1),
    "fn: expected a function of a Sample, got 'print'": lambda: Callback(None, "print"),
    "write: expected a function of a line, such as print, got 'out.txt'": (
        lambda: Log(None, write="out.txt")
    ),
    "writer: expected a torch.utils.tensorboard.SummaryWriter or None, got 'runs'": (
        lambda: TensorBoard(None, "runs")
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_are_refused(message: str) -> None:
    assert message in raised(REFUSED[message]).text


# A monitor's life.


def lives(rank: int, world_size: int) -> dict[str, int]:
    run, counts = Run(), {}
    for name in ("detached", "left", "forgotten"):
        samples: list[Sample] = []
        monitor = Callback(run.handle, samples.append, every=1)
        run.step(rank, 0)
        if name == "detached":
            monitor.detach()
            monitor.detach()
            run.step(rank, 1)
        elif name == "left":
            with monitor:
                run.step(rank, 1)
            run.step(rank, 2)
        del monitor
        gc.collect()
        run.step(rank, 2)
        counts[name] = len(samples)
    run.handle.close()
    return counts


def test_monitor_stays_until_it_is_detached(pair: World) -> None:
    for counts in pair.run(lives):
        assert counts == {"detached": 1, "left": 2, "forgotten": 2}


def dropped(rank: int, world_size: int, zero: bool) -> list[bool]:
    """Whether the model and what holds its engine are gone, while a monitor is held or not."""
    gone = []
    for held in (False, True):
        run = Run(zero=zero)
        kept = run.ddp  # a callback that knows its model
        monitor: Any = Callback(run.owner, lambda sample, ddp=kept: ddp, every=1, layers_every=1)
        run.steps(rank, 2)
        parts = run.ddp, run.handle._compressor
        alive = [weakref.ref(one) for one in parts]
        if held:
            monitor._fn = print
        else:
            del monitor
        del run, kept, parts
        gc.collect()
        gone.append(all(one() is None for one in alive))
    return gone


@pytest.mark.parametrize("zero", [False, True], ids=["compress", "ZeRO"])
def test_monitor_keeps_no_model_alive(pair: World, zero: bool) -> None:
    assert pair.run(dropped, zero) == [[True, True]] * 2


class Recorder:
    """A callback that cannot be copied."""

    def __init__(self) -> None:
        self.lock, self.samples = threading.Lock(), list[Sample]()

    def __call__(self, sample: Sample) -> None:
        self.samples.append(sample)


def copied(rank: int, world_size: int) -> int:
    run, recorder = Run(), Recorder()
    Callback(run.handle, recorder, every=1)
    run.step(rank, 0)
    twin = copy.deepcopy(run.ddp)
    twin(batch(rank, 1)).square().mean().backward()
    run.handle.close()
    return len(recorder.samples)


def test_copy_of_a_model_has_no_monitor(pair: World) -> None:
    assert pair.run(copied) == [1, 1]


def attached_in_backward(rank: int, world_size: int) -> list[int]:
    run, samples = Run(), []
    run.steps(rank, 2)
    monitors: list[Callback] = []

    def attach(_: Tensor) -> None:
        if not monitors:  # all buckets but one are on their way
            monitors.append(Callback(run.handle, samples.append, every=1, layers_every=1))

    run.ddp.module.first.weight.register_hook(attach)
    run.steps(rank, 2)
    run.handle.close()
    return [len(sample.layers) for sample in samples]


def test_figures_are_of_whole_steps(pair: World) -> None:
    assert pair.run(attached_in_backward) == [[0, 6]] * 2


# Who is told.


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
    """What goes to stdout, and to a handler that is there."""
    path, run = Path(text, f"out{rank}"), Run()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(f"{record.name} {record.getMessage()[:11]}")
    logger = logging.getLogger("zcomm")
    Log(run.handle, every=1)
    with path.open("w") as sys.stdout:
        run.step(rank, 0)
        logger.addHandler(handler)
        run.step(rank, 1)  # below the level
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
    """What TensorBoard writes."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written.append((tag, value, step))


TOTALS = {
    *("ratio", "step_s", "raw_bytes", "wire_bytes", "encode_s", "wait_s", "decode_s", "exposed_s"),
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
    """The ranges and their threads: as torch.profiler is by default, and of all threads."""
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


@pytest.mark.parametrize("zero", [False, True], ids=["compress", "ZeRO"])
def test_profiler_shows_ranges(pair: World, tmp_path: Path, zero: bool) -> None:
    main = MAIN | ({"zcomm::gather_parameters"} if zero else set())
    for default, everything in pair.run(profiled, zero, str(tmp_path)):
        assert set(default) == main
        assert set(everything) == main | ENGINE
        (main_thread,) = {tid for name in main for tid in everything[name]}
        (engine_thread,) = {tid for name in ENGINE for tid in everything[name]}
        assert main_thread != engine_thread
