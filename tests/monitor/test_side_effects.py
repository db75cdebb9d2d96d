"""Monitors do not change any bit of training, break anything, or keep anything alive."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_training import Mixed, assert_bit_equal, batch
from monitored_training import CODECS, Run
from raised import raised
from ranks import World
from zcomm.monitor import Callback, Log, Sample, TensorBoard

pytest_plugins = ["ddp_ranks"]


def feedbacks(codec: str) -> tuple[bool | float, ...]:
    return (0.8, True) if codec in ("sign", "topk:0.02") else (False, True)


def watched_bits(rank: int, world_size: int, codec: str, zero: bool) -> list[bool]:
    """Compares runs with and without monitors on rank 0."""
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
    """An error before a bucket is submitted, which would leave DDP broken."""
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
    """Whether the model and the engine's owner are freed, with and without a live monitor."""
    gone = []
    for held in (False, True):
        run = Run(zero=zero)
        kept = run.ddp  # a callback that references its model
        monitor: Any = Callback(run.owner, lambda sample, ddp=kept: ddp, every=1, layers_every=1)
        run.steps(rank, 2)
        parts = run.ddp, run.handle._compressor
        alive = [weakref.ref(one) for one in parts]
        if held:
            monitor._fn = print
        else:
            del monitor
        del run, kept, parts
        # The engine's thread may still be finishing the last job.
        deadline = time.monotonic() + 5
        while any(one() is not None for one in alive) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
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
        if not monitors:  # all buckets but one are in flight
            monitors.append(Callback(run.handle, samples.append, every=1, layers_every=1))

    run.ddp.module.first.weight.register_hook(attach)
    run.steps(rank, 2)
    run.handle.close()
    return [len(sample.layers) for sample in samples]


def test_figures_are_of_whole_steps(pair: World) -> None:
    assert pair.run(attached_in_backward) == [[0, 6]] * 2
