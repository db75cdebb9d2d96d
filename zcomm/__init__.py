"""zcomm: compressed gradient communication for PyTorch data-parallel training."""

from __future__ import annotations

from zcomm.codecs import Codec, codec
from zcomm.kernels import available as available_kernels
from zcomm.layout import Layout, Residuals, Segment
from zcomm.wire import WireError

__version__ = "0.1.0"

__all__ = [
    "Codec",
    "Layout",
    "Residuals",
    "Segment",
    "WireError",
    "available_kernels",
    "codec",
]
