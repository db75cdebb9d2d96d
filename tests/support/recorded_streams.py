"""Streams without a device: they keep a log of what would run on which stream, and in what order.

Work is done at once, on the CPU, so results are right whatever the order. The log says whether they
would be on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zcomm.kernels
from stream_recorder import Clock, Recorder
from zcomm import collectives
from zcomm.ddp import compressor
from zcomm.engine.device import DeviceRunner
from zcomm.engine.streams import HostCopy
from zcomm.transport.channels import Channel

# Operations that make the host wait for a device.
HOST_WAITS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")


class RecordedEvent:
    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self.recorder, self.clock = recorder, clock

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.recorder.wait_on_host("synchronize")


class RecordedFuture(torch.futures.Future):  # type: ignore[type-arg]
    recorder: Recorder

    def set_result(self, result: Tensor) -> None:
        self.recorder.complete(self.recorder.event(), result)
        super().set_result(result)


class RecordedStreams:
    """zcomm.engine.streams.Streams for CPU tensors."""

    def __init__(self, recorder: Recorder) -> None:
        self.device = torch.device("cpu")
        self.recorder = recorder
        self.producers: set[str] = set()

    def note(self, *_: object) -> None:
        self.producers.add(self.recorder.current)

    def forget(self) -> None:
        self.producers.clear()

    def ready(self) -> list[RecordedEvent]:
        streams = sorted({*self.producers, self.recorder.current})
        return [RecordedEvent(self.recorder, self.recorder.event(stream)) for stream in streams]

    def side(self) -> Any:
        return self.recorder.on("side")

    def wait(self, event: Any) -> None:
        self.recorder.join("side", event.clock)

    def done(self) -> RecordedEvent:
        return RecordedEvent(self.recorder, self.recorder.event("side"))

    def wait_current(self, event: Any) -> None:
        self.recorder.join(self.recorder.current, event.clock)

    def record_stream(self, t: Tensor) -> None:
        self.recorder.kept.add(self.recorder.span(t).storage)

    def to_host(self, t: Tensor) -> HostCopy:
        return HostCopy(t.clone(), RecordedEvent(self.recorder, self.recorder.event()))

    def future(self) -> RecordedFuture:
        future = RecordedFuture()
        future.recorder = self.recorder
        return future


class RecordedWork:
    def __init__(self, recorder: Recorder, work: Any, clock: Clock) -> None:
        self.recorder, self.work, self.clock = recorder, work, clock

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self, *timeout: Any) -> object:
        result = self.work.wait(*timeout)
        self.recorder.join(self.recorder.current, self.clock)
        return result


class RecordedKernels:
    """A kernel set whose calls are operations."""

    def __init__(self, recorder: Recorder, kernel_set: Any) -> None:
        self.recorder, self.kernel_set = recorder, kernel_set
        self.name = kernel_set.name

    def encode(self, layout: Any, call: Any) -> None:
        residuals = call.residuals
        inputs = [t for t in residuals.inputs if t is not None] if residuals else []
        outputs = [t for t in residuals.outputs if t is not None] if residuals else []
        self.recorder.run("encode", parts(layout, call.grad) + inputs, [*outputs, call.wire])
        self.kernel_set.encode(layout, call)

    def decode_sum(self, layout: Any, call: Any) -> None:
        self.recorder.run("decode", call.wires, parts(layout, call.out))
        self.kernel_set.decode_sum(layout, call)


def parts(layout: Any, flat: Any) -> list[Tensor]:
    return [flat[s.offset : s.offset + s.numel] for s in layout.segments if s.numel]


class RecordedTorch(TorchDispatchMode):
    """Operations of torch in the thread that it is entered in."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        named = {a.name: v for a, v in zip(func._schema.arguments, args)} | kwargs
        reads, writes = [], []
        for argument in func._schema.arguments:
            tensors = tensors_in(named.get(argument.name))
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(tensors)
        result = func(*args, **kwargs)
        aliases = [r.alias_info for r in func._schema.returns]
        if name in HOST_WAITS:
            self.recorder.wait_on_host(name)
        if any(alias is not None and not alias.is_write for alias in aliases):
            return result  # a view
        new = tensors_in(result) if not any(aliases) else []
        for t in new:
            self.recorder.make(t)
        if "empty" not in name:
            self.recorder.run(name, reads, [*writes, *new])
        return result


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [t for one in value for t in tensors_in(one)]
    return [value] if type(value) in (Tensor, torch.nn.Parameter) else []


@contextmanager
def patched(*places: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    for place, name, value in places:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


@contextmanager
def device_engines(recorder: Recorder | None = None) -> Iterator[Recorder]:
    """Hooks, optimizers and collectives (of new groups) take the engine of a device."""
    found = recorder or Recorder()

    def streams_of(device: torch.device) -> RecordedStreams:
        return RecordedStreams(found)

    with patched((compressor, "streams_of", streams_of), (collectives, "streams_of", streams_of)):
        yield found


@contextmanager
def recorded() -> Iterator[Recorder]:
    """device_engines(), with a log of what they and this thread do."""
    recorder = Recorder()
    select, all_to_all, serve = zcomm.kernels.select, Channel.all_to_all, DeviceRunner.serve

    def recorded_select(*args: Any) -> RecordedKernels:
        return RecordedKernels(recorder, select(*args))

    def recorded_all_to_all(channel: Any, out: Tensor, send: Tensor, *splits: Any) -> Any:
        if out.dtype is not torch.uint8:  # signatures: of the host
            return all_to_all(channel, out, send, *splits)
        recorder.join("net", recorder.event())
        recorder.run("hop", [send], [out], stream="net")
        clock = recorder.event("net")
        return RecordedWork(recorder, all_to_all(channel, out, send, *splits), clock)

    def recorded_serve(runner: DeviceRunner, inbox: Any) -> None:
        with RecordedTorch(recorder):
            serve(runner, inbox)

    with (
        patched(
            (zcomm.kernels, "select", recorded_select),
            (Channel, "all_to_all", recorded_all_to_all),
            (DeviceRunner, "serve", recorded_serve),
        ),
        device_engines(recorder),
        RecordedTorch(recorder),
    ):
        yield recorder
