"""Streams: what the engine needs of a device whose work is enqueued, not done, when a call returns.

| stream          | what runs on it                                               |
| --------------- | ------------------------------------------------------------- |
| producers       | autograd's and the user's: gradients come from there          |
| the side stream | the engine's: encode, sum, decode                             |
| the group's     | NCCL's own: the hops                                          |

Events put them in order. The host waits for none of them in backward().
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...

    def synchronize(self) -> None:
        """The host waits until the device has come to it."""
        ...


class HostCopy:
    """A small tensor on its way to the host."""

    def __init__(self, pinned: Tensor, arrived: Event) -> None:
        self._pinned, self._arrived = pinned, arrived

    def values(self) -> list[Any]:
        """Waits for it; where it is read a step later, it is long there."""
        self._arrived.synchronize()
        values: list[Any] = self._pinned.tolist()
        return values


class Streams(Protocol):
    """The side stream of one device, and its order among others."""

    @property
    def device(self) -> torch.device: ...

    def note(self, *_: object) -> None:
        """The current stream is one of the producers, until forget()."""
        ...

    def forget(self) -> None:
        """The step is over: there are no producers but the stream that is current next time."""
        ...

    def ready(self) -> Sequence[Event]:
        """Events at the ends of the current stream and of the producers."""
        ...

    def side(self) -> AbstractContextManager[object]:
        """Inside, the side stream is current."""
        ...

    def wait(self, event: Event) -> None:
        """What is enqueued on the side stream from now on comes after the event."""
        ...

    def done(self) -> Event:
        """An event at the end of the side stream."""
        ...

    def follow(self, event: Event) -> None:
        """What is enqueued on the current stream from now on comes after the event."""
        ...

    def keep(self, t: Tensor) -> None:
        """Memory of another stream's is used on the side stream: it is not given to anyone else
        before that is done, whenever the tensor is dropped. Once in its life is enough."""
        ...

    def to_host(self, t: Tensor) -> HostCopy:
        """Starts a copy, on the current stream."""
        ...

    def future(self) -> Any:
        """A future for tensors of this device: set_result() puts an event on the current stream,
        and who waits for it makes its own stream follow."""
        ...


class CudaStreams:
    """Streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Its kernels are short, and the network waits for them: they go before backward's.
        self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._producers: dict[int, torch.cuda.Stream] = {}

    def note(self, *_: object) -> None:
        stream = torch.cuda.current_stream(self.device)
        self._producers[stream.cuda_stream] = stream

    def forget(self) -> None:
        self._producers.clear()

    def ready(self) -> list[Event]:
        current = torch.cuda.current_stream(self.device)
        streams = {**self._producers, current.cuda_stream: current}
        return [stream.record_event() for stream in streams.values()]

    def side(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._side)

    def wait(self, event: Any) -> None:
        self._side.wait_event(event)

    def done(self) -> Event:
        event: Event = self._side.record_event()
        return event

    def follow(self, event: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def keep(self, t: Tensor) -> None:
        if t.numel():
            t.record_stream(self._side)

    def to_host(self, t: Tensor) -> HostCopy:
        pinned = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        pinned.copy_(t, non_blocking=True)
        return HostCopy(pinned, torch.cuda.current_stream(self.device).record_event())

    def future(self) -> Any:
        return torch.futures.Future(devices=[self.device])


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None where calls return when the work is done."""
    return CudaStreams(device) if device.type == "cuda" else None
