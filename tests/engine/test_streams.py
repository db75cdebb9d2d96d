"""Stream order: nothing is read before it is written, or written while it is read.

The device engine runs on CPU tensors and gloo; the work it would enqueue is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import LM4, Net, batch, seeded
from ranks import World
from recorded_streams import RecordedStreams, recorded
from stream_recorder import Recorder, Report
from zcomm.engine.pipeline import SLOTS
from zcomm.engine.streams import Streams, streams_of
from zero_training import wrapped, zero


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2) as world:
        yield world


class Wide(nn.Module):
    """Has more chunks in a bucket than the engine has slots."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 1500), nn.Linear(1500, 300)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def backward(ddp: DistributedDataParallel, rank: int, step: int) -> None:
    ddp(batch(rank, step)).square().mean().backward()


def train_with_hook(
    rank: int, world_size: int, settings: dict[str, Any], scaled: bool
) -> tuple[Report, list[str]]:
    with recorded() as recorder:
        scaler = torch.amp.GradScaler("cpu") if scaled else None
        ddp = DistributedDataParallel(seeded(Wide), bucket_cap_mb=0.2)
        handle = zcomm.compress(ddp, scaler=scaler, **settings)
        opt = optim.SGD(ddp.parameters(), lr=0.1)
        waits = []
        for step in range(3):
            opt.zero_grad()
            loss = ddp(batch(rank, step)).square().mean()
            loss = scaler.scale(loss) if scaler else loss
            recorder.host_waits.clear()
            loss.backward()
            waits += recorder.host_waits
            scaler.step(opt) if scaler else opt.step()
            if scaler:
                scaler.update()
        handle.state_dict()
        handle.close()
    return Report(recorder), waits


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
@pytest.mark.parametrize(
    "settings", [LM4, {"codec": "sign", "chunk_mb": 1 / 16}], ids=["lm4", "sign with a decay"]
)
def test_hook_orders_its_streams_and_waits_for_none(
    pair: World, settings: dict[str, Any], scaled: bool
) -> None:
    for report, waits in pair.run(train_with_hook, settings, scaled):
        report.expect_order(hops=3 * 2 * (SLOTS + 2))
        # Whether the last step was finite, and the loss scale: both arrive with that step.
        assert waits == (["synchronize"] * 4 if scaled else [])


def branch_off(recorder: Recorder) -> None:
    """As autograd does: a gradient moves to another stream, which waits for the previous one."""
    recorder.join("branch", recorder.event())
    recorder.switch("branch")


def train_on_two_streams(rank: int, world_size: int, first: str, second: str) -> Report:
    with recorded() as recorder:
        ddp = DistributedDataParallel(seeded(Net))
        zcomm.compress(ddp, **LM4)
        # The very last two gradients: nothing else is computed between them.
        layer = ddp.module.first
        getattr(layer, first).register_hook(lambda grad: branch_off(recorder))
        getattr(layer, second).register_hook(lambda grad: recorder.switch("main"))
        backward(ddp, rank, 0)
    assert "branch" in {op.stream for op in recorder.operations}
    return Report(recorder)


@pytest.mark.parametrize("names", [("weight", "bias"), ("bias", "weight")])
def test_encode_comes_after_every_stream_that_made_a_gradient(
    pair: World, names: tuple[str, str]
) -> None:
    # In one of the two cases the bucket is full on `main`, with a gradient from `branch` in it.
    for report in pair.run(train_on_two_streams, *names):
        report.expect_order(hops=2)


def collect(rank: int, world_size: int) -> Report:
    group = dist.new_group(range(world_size))
    with recorded() as recorder:
        zcomm.all_reduce(torch.ones(1), "none", group)  # the handshake waits
        recorder.host_waits.clear()
        feedback = zcomm.Feedback()
        for _ in range(2):
            x = batch(rank, 0, 9 << 19)  # five chunks
            zcomm.all_reduce(x, "int8", group, feedback)
            part = torch.zeros(x.numel() // world_size)
            zcomm.reduce_scatter(part, x.add_(1), "none", group)
            whole = torch.zeros_like(x)
            work = zcomm.all_gather(whole, part.mul_(2), "lm4", group, async_op=True)
            work.wait()
            whole.sum()
    return Report(recorder)


def test_collectives_order_their_streams(pair: World) -> None:
    for report in pair.run(collect):
        report.expect_order(hops=2 * 3 * (SLOTS + 1))
        assert report.host_waits == []


def train_sharded(rank: int, world_size: int, options: dict[str, Any], scaled: bool) -> Any:
    with recorded() as recorder:
        ddp = wrapped(Wide, bucket_cap_mb=0.2)
        scaler = torch.amp.GradScaler("cpu") if scaled else None
        opt = zero(optim.AdamW, scaler=scaler, **options)(ddp)
        waits = []
        for step in range(4):
            if step % 2 == 0:
                opt.zero_grad()
            loss = ddp(batch(rank, step)).square().mean()
            loss = scaler.scale(loss) if scaler else loss
            recorder.host_waits.clear()
            loss.backward()
            waits += recorder.host_waits
            if step % 2 and scaler:
                scaler.step(opt)
                scaler.update()
            elif step % 2:
                opt.clip_grad_norm_(0.1)
                opt.step()
        opt.state_dict()
        opt.close()
    return Report(recorder), waits


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
@pytest.mark.parametrize("param_codec", [None, "lm4"])
def test_zero_orders_its_streams_and_backward_waits_for_none(
    pair: World, param_codec: str | None, scaled: bool
) -> None:
    options = {**LM4, "param_codec": param_codec}
    for report, waits in pair.run(train_sharded, options, scaled):
        report.expect_order(hops=4 * (SLOTS + 2))
        assert waits == (["synchronize"] * 6 if scaled else [])


# The recorder itself finds the errors it should.


def two_streams() -> tuple[Recorder, RecordedStreams, Tensor]:
    recorder = Recorder()
    t = torch.zeros(8)
    recorder.make(t)
    recorder.run("make", writes=[t])
    return recorder, RecordedStreams(recorder), t


def test_recorder_finds_a_read_without_an_event() -> None:
    recorder, streams, t = two_streams()
    with streams.side():
        recorder.run("early", reads=[t[4:]])
    assert recorder.races() == ["make on main, early on side"]
    assert recorder.not_kept() == ["early uses memory of main"]


def test_recorder_accepts_what_events_order() -> None:
    recorder, streams, t = two_streams()
    for event in streams.ready():
        streams.wait(event)
    streams.record_stream(t)
    with streams.side():
        recorder.run("encode", reads=[t[:4]])
    recorder.run("other half", writes=[t[4:]])
    streams.wait_current(streams.done())
    recorder.run("again", writes=[t])
    assert recorder.races() == recorder.not_kept() == []


def test_recorder_finds_a_future_that_is_set_too_early() -> None:
    recorder, streams, t = two_streams()
    with streams.side():
        recorder.run("decode", writes=[t])
    streams.future().set_result(t)  # on main
    assert recorder.early_futures == ["decode"]


# CUDA streams, with torch.cuda replaced.


class CudaStream:
    def __init__(self, log: list[Any], number: int) -> None:
        self.log, self.cuda_stream = log, number

    def record_event(self) -> tuple[str, int]:
        self.log.append(("record", self.cuda_stream))
        return "event", self.cuda_stream

    def wait_event(self, event: object) -> None:
        self.log.append(("wait", self.cuda_stream, event))


def test_cuda_streams_record_and_wait_where_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    current = [CudaStream(log, 1)]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: CudaStream(log, 9))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    streams = streams_of(torch.device("cuda:1"))
    assert isinstance(streams, Streams)
    current[0] = CudaStream(log, 2)
    streams.note()
    current[0] = CudaStream(log, 1)
    events = streams.ready()
    assert log == [("record", 2), ("record", 1)]  # a producer's, then the current stream's
    for event in events:
        streams.wait(event)
    streams.wait_current(streams.done())
    assert log[2:] == [
        ("wait", 9, ("event", 2)),
        ("wait", 9, ("event", 1)),
        ("record", 9),
        ("wait", 1, ("event", 9)),
    ]
    streams.forget()
    assert streams.ready() == [("event", 1)]
    marked: list[Any] = []
    t = SimpleNamespace(numel=lambda: 3, record_stream=marked.append)
    streams.record_stream(t)  # type: ignore[arg-type]
    assert [stream.cuda_stream for stream in marked] == [9]


def test_the_cpu_has_no_streams() -> None:
    assert streams_of(torch.device("cpu")) is None
