"""Streams: what the engine needs of a device that enqueues work instead of doing it at once.

| stream          | what runs on it                                               |
| --------------- | ------------------------------------------------------------- |
| producers       | autograd's and the user's: gradients come from them           |
| the side stream | the engine's: encode, sum, decode                             |
| the group's     | NCCL's own: the hops                                          |

Events put them in order. The host waits for none of them in backward().
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

Event = Any  # a torch.cuda.Event, which has no types


class HostCopy:
    """A small tensor on its way to the host."""

    def __init__(self, pinned: Tensor, arrived: Event) -> None:
        self._pinned, self._arrived = pinned, arrived

    def values(self) -> list[Any]:
        """Waits for it; read a step later, it arrived long ago."""
        self._arrived.synchronize()
        values: list[Any] = self._pinned.tolist()
        return values


class Streams:
    """The side stream of a CUDA device, and its order among others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Its kernels are short, and the network waits for them: they go before backward's.
        self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._producers: dict[int, torch.cuda.Stream] = {}

    def note(self, *_: object) -> None:
        """The current stream is one of the producers, until forget()."""
        stream = torch.cuda.current_stream(self.device)
        self._producers[stream.cuda_stream] = stream

    def forget(self) -> None:
        """The step is over: the next one notes its own producers."""
        self._producers.clear()

    def ready(self) -> list[Event]:
        """Events at the ends of the current stream and of the producers."""
        current = torch.cuda.current_stream(self.device)
        streams = {**self._producers, current.cuda_stream: current}
        return [stream.record_event() for stream in streams.values()]

    def side(self) -> AbstractContextManager[object]:
        """Inside, the side stream is current."""
        return torch.cuda.stream(self._side)

    def wait(self, event: Event) -> None:
        """What is enqueued on the side stream from now on comes after the event."""
        self._side.wait_event(event)

    def wait_current(self, event: Event) -> None:
        """What is enqueued on the current stream from now on comes after the event."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def done(self) -> Event:
        """An event at the end of the side stream."""
        event: Event = self._side.record_event()
        return event

    def record_stream(self, t: Tensor) -> None:
        """The side stream uses memory of another stream: the allocator gives it to nobody else
        before that is done, whenever the tensor is dropped. Once in a tensor's life is enough."""
        if t.numel():
            t.record_stream(self._side)

    def to_host(self, t: Tensor) -> HostCopy:
        """Starts a copy, on the current stream."""
        pinned = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        pinned.copy_(t, non_blocking=True)
        return HostCopy(pinned, torch.cuda.current_stream(self.device).record_event())

    def future(self) -> Any:
        """A future for tensors of this device: set_result() records an event on the current
        stream, and whoever waits for the future makes its own stream wait for the event."""
        return torch.futures.Future(devices=[self.device])


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None where a call returns when its work is done."""
    return Streams(device) if device.type == "cuda" else None
