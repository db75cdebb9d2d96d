"""What the kernel sets of devices share: streams, memory that a layout keeps there, and faults."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from zcomm.kernels.base import KernelLayout
from zcomm.kernels.memory import upload
from zcomm.wire import WireError

NO_FAULT = -1


class Stream:
    """Torch's current stream on a device. Memory of the CPU is an emulator's device."""

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


class DeviceMemory:
    """A layout's tables and scratch memory on the devices and streams that used it."""

    def __init__(self) -> None:
        self._tables: dict[torch.device, Tensor] = {}
        self._scratch: dict[tuple[str, int, torch.device], Tensor] = {}
        self._address_tables: dict[tuple[int, ...], Tensor] = {}

    def table(self, data: Tensor, stream: Stream) -> int:
        """Where the layout's table lies; uploaded at the first call."""
        found = self._tables.get(stream.device)
        if found is None:
            found = self._tables[stream.device] = upload(data, stream.device)
        return found.data_ptr()

    def reserved(self, what: str, nbytes: int, stream: Stream) -> int:
        """Kernels leave it zero. A larger one takes the place of the old one, in stream order."""
        key = (what, stream.handle, stream.device)
        found = self._scratch.get(key)
        if found is None or found.numel() < nbytes:
            found = torch.zeros(nbytes, dtype=torch.uint8, device=stream.device)
            self._scratch[key] = found
        return found.data_ptr()

    def address_table(self, addresses: list[int], stream: Stream) -> int:
        """A table of addresses in device memory."""
        key = tuple(addresses)
        found = self._address_tables.get(key)
        if found is None:
            found = upload(torch.tensor(addresses, dtype=torch.int64), stream.device)
            self._address_tables[key] = found
        return found.data_ptr()


def new_faults(device: torch.device) -> Tensor:
    """Where kernels leave the least fault that they find."""
    return torch.full((1,), NO_FAULT, dtype=torch.int64, device=device)


# By kind, as csrc/cuda/args.h numbers them: what was expected, and what was found.
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
    """The error of a fault: stage (2 bits), wire (14), segment or frame (24), kind (8), detail."""
    value &= (1 << 64) - 1
    wire, index = value >> 48 & 0x3FFF, value >> 24 & 0xFFFFFF
    kind, detail = value >> 16 & 0xFF, value & 0xFFFF
    if kind <= 1:
        where = f"wire {wire}" + (f", frame {index}" if len(layout.frames) > 1 else "")
    else:
        where = f"wire {wire}, segment {index} ({layout.segments[index].codec.spec})"
    expected, got = _KINDS[kind] if kind else (f"the layout's {_FIELDS[detail]}", "another")
    text = f"expected {expected}, got {got}".format(detail=detail)
    return WireError(f"{where}: {text}", wire)
