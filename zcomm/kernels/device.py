"""What device kernel sets share: streams, the memory a layout keeps on a device, and faults."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from zcomm.kernels.base import KernelLayout, wire_error
from zcomm.kernels.memory import capturing, expect_no_capture, upload
from zcomm.wire.header import WireError

NO_FAULT = -1
_MAX_STREAMS = 32  # of a layout
_MAX_ADDRESS_TABLES = 64  # of a layout and a stream


class Stream:
    """Torch's current stream on a device. For an emulator, the CPU is the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle = 0
        if device.type == "cuda":
            self.handle = torch.cuda.current_stream(device).cuda_stream
        elif device.type != "cpu":
            self.handle = torch.get_device_module(device).current_stream(device).stream_id

    def device_current(self) -> Any:
        if self.device.type == "cuda":
            return torch.cuda.device(self.device)
        if self.device.type == "cpu":
            return nullcontext()
        return torch.get_device_module(self.device).device(self.device)


class StreamMemory:
    """A layout's tables and scratch memory for one stream, which is current in every call.

    Memory that a CUDA graph captured stays allocated until the process ends, because the graph may
    be replayed at any time.
    """

    def __init__(self, device: torch.device) -> None:
        self.captured = False
        self._device = device
        self._table: Tensor | None = None
        self._scratch: dict[str, Tensor] = {}
        self._address_tables: dict[tuple[int, ...], Tensor] = {}  # most recent last
        self._outgrown: list[Tensor] = []

    def note_capture(self) -> None:
        if not self.captured and capturing(self._device):
            self.captured = True
            _captured.append(self)

    def table(self, data: Tensor) -> int:
        """The address of the layout's table; the first call uploads it."""
        if self._table is None:
            self._table = upload(data, self._device)
        return self._table.data_ptr()

    def reserved(self, what: str, nbytes: int) -> int:
        """Scratch memory; kernels leave it zeroed. It grows by replacement, in stream order."""
        found = self._scratch.get(what)
        if found is None or found.numel() < nbytes:
            expect_no_capture(self._device)
            if found is not None and self.captured:
                self._outgrown.append(found)
            found = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
            self._scratch[what] = found
        return found.data_ptr()

    def address_table(self, addresses: list[int]) -> int:
        """A table of addresses in device memory; recent ones are cached."""
        key = tuple(addresses)
        found = self._address_tables.pop(key, None)
        if found is None:
            found = upload(torch.tensor(addresses, dtype=torch.int64), self._device)
            if len(self._address_tables) >= _MAX_ADDRESS_TABLES and not self.captured:
                del self._address_tables[next(iter(self._address_tables))]
        self._address_tables[key] = found
        return found.data_ptr()


_captured: list[StreamMemory] = []


class DeviceMemory:
    """A layout's memory on devices: one StreamMemory per stream that used it.

    Streams share nothing: no call waits for another stream, and freed memory is reused in the order
    of its own stream.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, int], StreamMemory] = {}  # most recent last

    def on(self, stream: Stream) -> StreamMemory:
        key = (stream.device, stream.handle)
        found = self._streams.pop(key, None)
        if found is None:
            found = StreamMemory(stream.device)
            if len(self._streams) >= _MAX_STREAMS:
                self._drop_oldest()
        self._streams[key] = found
        found.note_capture()
        return found

    def _drop_oldest(self) -> None:
        oldest = next((key for key, old in self._streams.items() if not old.captured), None)
        if oldest is not None:
            del self._streams[oldest]


def new_faults(device: torch.device) -> Tensor:
    """The number in which kernels store the lowest fault they find."""
    return torch.full((1,), NO_FAULT, dtype=torch.int64, device=device)


# What was expected and what was found, by fault kind as numbered in csrc/cuda/args.h.
_KINDS = (
    ("", ""),
    ("a checksum that fits the bytes", "another"),
    ("a scale that is zero, normal or NaN", "{detail:#x}"),
    ("codes that occur", "one that does not"),
    ("codes 0 under scale {detail:#x}", "others"),
    ("padding 0", "other bytes"),
    ("a topk count within its range", "more"),
    ("all topk counts or none to be flagged", "some"),
    ("topk counts that add up to k", "another total"),
    ("topk offsets that increase within their range", "{detail}"),
    ("a finite topk value that is not -0", "{detail}"),
    ("no topk entries in a segment that is not finite", "some"),
)
_FIELDS = (
    "magic",
    "version",
    "codec",
    "flags",
    "checksum flag",
    "elements",
    "frame bytes",
    "layout",
    "checksum field",
)


def fault_error(value: int, layout: KernelLayout) -> WireError:
    """The error for a fault: stage (2 bits), wire (14), segment or frame (24), kind (8), detail."""
    value &= (1 << 64) - 1
    wire, index = value >> 48 & 0x3FFF, value >> 24 & 0xFFFFFF
    kind, detail = value >> 16 & 0xFF, value & 0xFFFF
    expected, got = _KINDS[kind] if kind else (f"the layout's {_FIELDS[detail]}", "another")
    text = f"expected {expected}, got {got}".format(detail=detail)
    if kind <= 1:
        return wire_error(layout, wire, text, frame=index)
    return wire_error(layout, wire, text, segment=index)
