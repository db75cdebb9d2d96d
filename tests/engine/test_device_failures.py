"""Failures in the device engine: detected on the device, raised at the next step.

Here it runs on CPU tensors and gloo, with streams that are only recorded.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
import zcomm.kernels
from failing_training import TIMEOUT_S, backward, damage, model
from raised import Raised, raised
from ranks import World, run_ranks
from recorded_streams import RecordedEvent, RecordedStreams, device_engines, patched
from stream_recorder import Recorder
from zcomm.ddp import compressor
from zcomm.ddp.parameters import device_of
from zcomm.engine import faults
from zcomm.engine.faults import Faults
from zcomm.transport.channels import Channel, expect_sender
from zcomm.wire.header import WireError


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[World]:
    with World(3) as world:
        yield world


# Wires that arrive damaged.


class Deferring:
    """A kernel set that acts like a device's: a refused wire lowers the number it is given."""

    def __init__(self, kernel_set: Any) -> None:
        self.kernel_set, self.name = kernel_set, kernel_set.name
        self.encode = kernel_set.encode

    def decode_sum(self, layout: Any, call: Any) -> None:
        try:
            self.kernel_set.decode_sum(layout, call._replace(faults=None))
        except WireError as error:
            assert call.faults is not None
            ERRORS.append(error)
            call.faults.fill_(len(ERRORS) - 1)


ERRORS: list[WireError] = []


class Released(RecordedEvent):
    """An event that the device reaches when the test says so."""

    now = False

    def query(self) -> bool:
        return Released.now


class LateStreams(RecordedStreams):
    def done(self) -> RecordedEvent:
        return Released(self.recorder, self.recorder.event("side"))


@contextmanager
def late_devices() -> Iterator[None]:
    """Device engines that do not finish before Released.now."""
    select, recorder = zcomm.kernels.select, Recorder()
    Released.now = False
    with patched(
        (zcomm.kernels, "select", lambda *args: Deferring(select(*args))),
        (faults, "explain", lambda value, layout: ERRORS[value]),
        (compressor, "streams_of", lambda device: LateStreams(recorder)),
    ):
        yield


class DamagingChannel(Channel):
    """Flips a bit in the data from the last other rank in one of the hops."""

    hop: int
    byte: int

    def all_to_all(self, out: Any, send: Any, out_splits: Any, send_splits: Any) -> Any:
        work = super().all_to_all(out, send, out_splits, send_splits)
        if self.hop == 0:
            work.wait()
            damage(out, out_splits, self.byte)
        self.hop -= 1
        return work


def train_with_damage(rank: int, world_size: int, hop: int, byte: int, then: str) -> list[Raised]:
    with late_devices():
        ddp = model()
        handle = zcomm.compress(ddp, codec="int8")
        Released.now = True
        backward(ddp)
        handle.state_dict()
        Released.now = False
        if rank == 1:
            channel = handle._compressor.engine.transport.flat.reduce
            channel.__class__ = DamagingChannel
            channel.hop, channel.byte = hop, byte
        found = [raised(backward, ddp)]
        Released.now = True
        if then == "backward":
            return [*found, raised(backward, ddp), raised(backward, ddp)]
        call = {"state_dict": handle.state_dict, "close": handle.close}[then]
        if rank == 1:
            found.append(raised(call))
        dist.barrier()
        return found


@pytest.mark.parametrize("byte", [0, 9, 200], ids=["magic", "element count", "body"])
@pytest.mark.parametrize("hop", [0, 1], ids=["reduce-scatter", "all-gather"])
def test_corrupted_wire_names_its_sender_at_the_next_step(
    three_ranks: World, hop: int, byte: int
) -> None:
    found = three_ranks.run(train_with_damage, hop, byte, "backward")
    late, first, again = found[1]
    assert late.type == "NoneType"  # not detected yet
    assert first.type == "WireError"
    name = ["reduce-scatter", "all-gather"][hop]
    assert f"rank 1: bucket 0 of step 1, {name} of chunk 1 of" in first.text
    assert "corrupted wire from rank 2" in first.text
    assert again.text == first.text
    for rank in (0, 2):
        error = found[rank][1]
        assert error.type == "CommunicationError"
        assert "rank 1: WireError" in error.text
        assert error.seconds < 5


@pytest.mark.parametrize("then", ["state_dict", "close"])
def test_corrupted_wire_is_found_before_anything_is_saved(three_ranks: World, then: str) -> None:
    late, error = three_ranks.run(train_with_damage, 0, 200, then)[1]
    assert late.type == "NoneType"
    assert error.type == "WireError"
    assert "corrupted wire from rank 2" in error.text


def numbers(found: list[int]) -> tuple[Faults, list[Tensor]]:
    streams = RecordedStreams(Recorder())
    with streams.side():
        kept = Faults(streams)
        taken = [kept.take(f"layout {i}", lambda error: error) for i in range(len(found))]
        for number, value in zip(taken, found):
            number.fill_(value)
    return kept, taken


def test_first_of_several_faults_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "explain", lambda value, layout: WireError(f"{value} {layout}"))
    kept, taken = numbers([-1, -1, 7, 5])
    with kept._streams.side():
        (findings,) = kept.collect()
        assert kept.collect() == []
    assert str(findings.error()) == "7 layout 2"
    assert all(int(number) == -1 for number in taken)  # ready for the next job


def test_more_decodes_than_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_COUNT", 2)
    monkeypatch.setattr(faults, "explain", lambda value, layout: WireError(f"{value} {layout}"))
    streams = RecordedStreams(Recorder())
    with streams.side():
        kept = Faults(streams)
        for i in range(5):
            kept.take(f"layout {i}", lambda error: error).fill_(3 if i == 3 else -1)
        found = [findings.error() for findings in kept.collect()]
    assert [str(error) for error in found] == ["None", "3 layout 3", "None"]


# Ranks that disagree, die, or whose device never finishes.


def call_differently(rank: int, world_size: int) -> tuple[Raised, int]:
    group = dist.new_group(range(world_size))
    sent, all_to_all = [], Channel.all_to_all

    def counted(channel: Channel, out: Tensor, *args: Any) -> Any:
        sent.extend([out] if out.dtype is torch.uint8 else [])
        return all_to_all(channel, out, *args)

    with device_engines(), patched((Channel, "all_to_all", counted)):
        codec = "int8" if rank == 2 else "lm4"
        return raised(zcomm.all_reduce, torch.ones(5000), codec, group), len(sent)


def test_calls_that_differ_are_refused_before_anything_is_sent(three_ranks: World) -> None:
    for error, sent in three_ranks.run(call_differently):
        assert error.is_value_error
        assert "expected the same call on all ranks" in error.text
        assert "rank 2: all_reduce(codec='int8'" in error.text
        assert sent == 0


def train_until_killed(rank: int, world_size: int) -> list[Raised]:
    with device_engines():
        ddp = model()
        zcomm.compress(ddp, timeout_s=TIMEOUT_S)
        backward(ddp)
        if rank == 2:
            ddp.module[0].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        return [raised(backward, ddp), raised(backward, ddp)]


def test_rank_that_dies_is_named() -> None:
    found = run_ranks(3, train_until_killed, expect_dead=[2])
    for rank in (0, 1):
        first, again = found[rank]
        assert first.type == "CommunicationError"
        assert f"rank {rank}: rank 2 died or stopped (no answer for " in first.text
        assert "rank 2 died or stopped" in first.text
        assert first.seconds < 2 * TIMEOUT_S
        assert again.text == first.text


def train_on_a_device_that_hangs(rank: int, world_size: int) -> list[Raised]:
    with late_devices():
        ddp = model()
        zcomm.compress(ddp, timeout_s=2.0)
        return [raised(backward, ddp), raised(backward, ddp)]


def test_device_that_does_not_come_to_an_end_is_told_at_the_next_step(three_ranks: World) -> None:
    for rank, (first, then) in enumerate(three_ranks.run(train_on_a_device_that_hangs)):
        assert first.type == "NoneType"
        assert then.type == "CommunicationError"
        text = "all ranks are alive, but this did not finish: bucket 0 of step 0, on the device"
        assert f"rank {rank}: {text}" in then.text
        assert then.seconds < 4


def threads_left(rank: int, world_size: int) -> list[int]:
    counts = []
    with device_engines():
        for kind in ("closed", "dropped"):
            ddp = model()
            handle = zcomm.compress(ddp)
            backward(ddp)
            counts.append(engine_threads())
            if kind == "closed":
                handle.close()
            del ddp, handle
            gc.collect()
            counts.append(engine_threads())
    return counts


def engine_threads() -> int:
    return sum(thread.name == "zcomm-engine" for thread in threading.enumerate())


def test_no_threads_are_left_behind() -> None:
    for counts in run_ranks(2, threads_left):
        assert counts == [1, 0, 1, 0]


# What is refused up front.


def refuse(rank: int, world_size: int) -> list[Raised]:
    device = torch.device("cuda:0")
    return [
        raised(expect_sender, device, None, "all_reduce: tensor"),
        raised(expect_sender, torch.device("cpu"), None, "all_reduce: tensor"),
    ]


def test_group_that_cannot_send_a_devices_tensors_is_refused(three_ranks: World) -> None:
    for on_cuda, on_cpu in three_ranks.run(refuse):
        assert on_cuda.is_value_error
        assert (
            "all_reduce: tensor: expected a group that sends tensors on cuda, got backend 'gloo'; "
            "use init_process_group('cpu:gloo,cuda:nccl')" in on_cuda.text
        )
        assert on_cpu.type == "NoneType"


def test_model_on_several_devices_is_refused() -> None:
    named: Any = {
        "first.weight": SimpleNamespace(device=torch.device("cuda:0")),
        "last.weight": SimpleNamespace(device=torch.device("cuda:1")),
    }
    with pytest.raises(ValueError, match=r"'last\.weight': expected device cuda:0, that of 'first"):
        device_of(named)
    named["last.weight"].device = torch.device("cuda:0")
    assert device_of(named) == torch.device("cuda:0")
    assert device_of({}) == torch.device("cpu")
