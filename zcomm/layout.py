"""Layout: which segments go into which frame, and the calls that encode and decode them all."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from zcomm import kernels as kernel_sets
from zcomm.kernels.base import SegmentCodec
from zcomm.residuals import Residuals
from zcomm.wire import (
    ALIGNMENT,
    HEADER_NBYTES,
    MAX_UNITS,
    Frame,
    WireError,
    codec_byte,
    layout_hash,
)

_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Segment:
    """`numel` elements at `offset` of the gradient, encoded with one codec for one peer."""

    codec: SegmentCodec
    numel: int
    offset: int = 0
    peer: int = 0

    def __post_init__(self) -> None:
        if not hasattr(self.codec, "body_nbytes"):
            raise ValueError(f"Segment: expected a Codec, got {self.codec!r}; use zcomm.codec(...)")
        for field in ("numel", "offset", "peer"):
            if getattr(self, field) < 0:
                raise ValueError(f"Segment: expected {field} >= 0, got {getattr(self, field)}")


class Layout:
    """Segments, and the frames that carry them: one frame for each peer, one after another.

    Gradients and outputs are flat 1-D tensors that the segments' offsets refer to. A layout does
    not change once made; build it once and use it for every step.
    """

    def __init__(self, segments: Iterable[Segment], peers: int | None = None) -> None:
        self.segments = tuple(segments)
        self.peers = _peer_count(self.segments, peers)
        self.numel = sum(s.numel for s in self.segments)
        self.span = _checked_span(self.segments)
        members: list[list[int]] = [[] for _ in range(self.peers)]
        for i, segment in enumerate(self.segments):
            members[segment.peer].append(i)
        self.frames, self.body_starts = _place(self.segments, members)
        self.frame_nbytes = tuple(frame.nbytes for frame in self.frames)
        self.wire_nbytes = sum(self.frame_nbytes)
        self.native: Any = None  # the cpu kernels keep their form of this layout here

    def encode(
        self,
        grad: Tensor,
        residuals: Residuals | None = None,
        *,
        out: Tensor | None = None,
        prescale: float = 1.0,
        verify: bool = True,
        kernels: str | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """The wire of grad * prescale + residuals: all frames, in the order of the peers.

        Overwrites the residuals' outputs with what the wire leaves out, and `out`, if given, with
        the wire. `verify` adds checksums.
        """
        self._check_flat(grad, "gradient", _GRAD_DTYPES)
        device = grad.device
        if residuals is not None:
            residuals.check(self, device)
        if not math.isfinite(ctypes.c_float(prescale).value):
            raise ValueError(f"encode: expected a prescale that is finite in fp32, got {prescale}")
        wire = self._wire_out(out, grad, device)
        kernel_set = kernel_sets.select(device, kernels)
        kernel_set.encode(self, grad, residuals, wire, float(prescale), bool(verify), threads)
        return wire

    def decode(
        self,
        wire: Tensor,
        *,
        out: Tensor | None = None,
        verify: bool = True,
        kernels: str | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """The same as decode_sum of one wire."""
        return self.decode_sum((wire,), out=out, verify=verify, kernels=kernels, threads=threads)

    def decode_sum(
        self,
        wires: Sequence[Tensor] | Tensor,
        *,
        out: Tensor | None = None,
        verify: bool = True,
        kernels: str | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """The fp32 sum of wires (a sequence, or the rows of a 2-D tensor), in their order.

        Overwrites the segments' elements of `out`, and only those; without `out` the others are 0.
        Refuses a malformed wire with a WireError; what `out` holds is then undefined.
        """
        rows = self._wire_rows(wires)
        device = rows[0].device
        if out is None:
            make = torch.empty if self.numel == self.span else torch.zeros
            out = make(self.span, dtype=torch.float32, device=device)
        else:
            self._check_flat(out, "out", (torch.float32,))
            _expect_device("out", device, out)
            _expect_apart("out", out, rows, "the wires")
        kernel_set = kernel_sets.select(device, kernels)
        kernel_set.decode_sum(self, rows, out, bool(verify), threads)
        return out

    def __reduce__(self) -> tuple[type[Layout], tuple[tuple[Segment, ...], int]]:
        # The native form is left behind: it holds no state and is made again when needed.
        return Layout, (self.segments, self.peers)

    def _check_flat(self, t: Tensor, what: str, dtypes: tuple[torch.dtype, ...]) -> None:
        if t.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{what}: expected {names}, got {t.dtype}; convert it with .to()")
        if t.dim() != 1 or not t.is_contiguous():
            raise ValueError(
                f"{what}: expected a contiguous 1-D tensor, got shape {tuple(t.shape)} "
                f"with strides {t.stride()}; use .contiguous().view(-1)"
            )
        if t.shape[0] < self.span:
            raise ValueError(f"{what}: expected {self.span} elements, got {t.shape[0]}")

    def _wire_out(self, out: Tensor | None, grad: Tensor, device: torch.device) -> Tensor:
        if out is None:
            return torch.empty(self.wire_nbytes, dtype=torch.uint8, device=device)
        _check_bytes(out, "out")
        if out.shape[0] != self.wire_nbytes:
            raise ValueError(f"expected out of {self.wire_nbytes} bytes, got {out.shape[0]}")
        _expect_device("out", device, out)
        _expect_apart("out", out, (grad,), "the gradient")
        return out

    def _wire_rows(self, wires: Sequence[Tensor] | Tensor) -> Sequence[Tensor]:
        if isinstance(wires, Tensor):
            if wires.dim() != 2:
                raise ValueError(
                    f"expected a list of wires or a 2-D tensor, got shape {tuple(wires.shape)}"
                )
            wires = wires.unbind(0)
        if not wires:
            raise ValueError("expected at least 1 wire, got 0")
        device = wires[0].device
        for i, row in enumerate(wires):
            _check_bytes(row, "wire ", i)
            if row.shape[0] != self.wire_nbytes:
                message = f"wire {i}: expected {self.wire_nbytes} bytes, got {row.shape[0]}"
                raise WireError(message, i)
            if row.device != device:
                _expect_device(f"wire {i}", device, row)
        return wires


def _peer_count(segments: Sequence[Segment], peers: int | None) -> int:
    needed = max((s.peer for s in segments), default=0) + 1
    if peers is not None and peers < needed:
        raise ValueError(f"Layout: expected peers >= {needed} for these segments, got {peers}")
    return needed if peers is None else peers


def _checked_span(segments: Sequence[Segment]) -> int:
    """The end of the last segment; refuses segments that overlap."""
    end = 0
    for segment in sorted((s for s in segments if s.numel), key=lambda s: s.offset):
        if segment.offset < end:
            raise ValueError(
                f"Layout: expected segments that do not overlap, got one at offset "
                f"{segment.offset} where another ends at {end}"
            )
        end = segment.offset + segment.numel
    return max((s.offset + s.numel for s in segments), default=0)


def _place(
    segments: Sequence[Segment], members: Sequence[Sequence[int]]
) -> tuple[tuple[Frame, ...], tuple[int, ...]]:
    """The frames, and where each segment's body starts in the wire."""
    frames: list[Frame] = []
    body_starts = [0] * len(segments)
    start = 0
    for indices in members:
        inside = [segments[i] for i in indices]
        sizes = [s.codec.body_nbytes(s.numel) for s in inside]
        *starts, end = accumulate(sizes, initial=start + HEADER_NBYTES)
        for i, body_start in zip(indices, starts):
            body_starts[i] = body_start
        frames.append(_frame(start, end, inside))
        start = end
    return tuple(frames), tuple(body_starts)


def _frame(start: int, end: int, segments: Sequence[Segment]) -> Frame:
    if (end - start) // ALIGNMENT > MAX_UNITS:
        raise ValueError(
            f"Layout: expected frames of at most {MAX_UNITS * ALIGNMENT} bytes, got {end - start}"
        )
    rows = [(s.codec.id, s.codec.log2_block, s.numel, s.codec.k(s.numel)) for s in segments]
    codec = codec_byte(s.codec.id for s in segments)
    elements = sum(s.numel for s in segments)
    return Frame(start, end - start, codec, elements, layout_hash(rows))


def _check_bytes(t: Tensor, what: str, index: int | str = "") -> None:
    if t.dtype != torch.uint8:
        raise ValueError(f"{what}{index}: expected dtype uint8, got {t.dtype}")
    if t.dim() != 1 or not t.is_contiguous():
        raise ValueError(
            f"{what}{index}: expected contiguous 1-D bytes, got shape {tuple(t.shape)} "
            f"with strides {t.stride()}; use .contiguous()"
        )


def _expect_device(what: str, expected: torch.device, t: Tensor) -> None:
    if t.device != expected:
        raise ValueError(f"{what}: expected device {expected}, got {t.device}; move it with .to()")


def _expect_apart(what: str, t: Tensor, others: Sequence[Tensor], name: str) -> None:
    start = t.data_ptr()
    end = start + t.nbytes
    for other in others:
        first = other.data_ptr()
        if first < end and start < first + other.nbytes:
            raise ValueError(f"expected {what} and {name} in separate memory, got an overlap")


__all__ = ["Layout", "Residuals", "Segment"]
