"""The CUDA kernels: addresses, sizes and a stream in, no torch."""

from zcomm._core import INLINE_WIRES as INLINE_WIRES
from zcomm._core import Device
from zcomm._core import Plan as Plan

ARCHS: list[int]  # machine code for each of them, PTX for the last

_device: Device
encode = _device.encode
decode_sum = _device.decode_sum

def missing() -> str:
    """Why nothing can be launched here; "" if it can."""

def capability(ordinal: int, /) -> tuple[int, int]:
    """A device's compute capability."""
