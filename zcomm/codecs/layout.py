"""Layout: which segments go into which frame, and the calls that encode and decode them."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zcomm import kernels as kernel_sets
from zcomm.base import arguments, cupy_arrays
from zcomm.codecs.residuals import Residuals
from zcomm.kernels.base import DecodeCall, EncodeCall
from zcomm.wire.header import WireError
from zcomm.wire.segments import Segment, checked_segments, checked_span, packed, peer_count, place


class Layout:
    """Segments and the frames that carry them: one frame per peer, back to back.

    Gradients and outputs are flat 1-D tensors; segment offsets index into them. Layouts are
    immutable: build one and reuse it at every step. Layouts with the same segments and peers are
    equal.
    """

    def __init__(self, segments: Iterable[Segment], peers: int | None = None) -> None:
        self.segments = checked_segments(segments)
        self.peers = peer_count(self.segments, peers)
        self.numel = sum(s.numel for s in self.segments)
        self.span = checked_span(self.segments)
        self.frames, self.body_starts = place(self.segments, self.peers)
        self.frame_nbytes = tuple(frame.nbytes for frame in self.frames)
        self.wire_nbytes = sum(self.frame_nbytes)
        self.native: Any = None  # the cpu kernels cache their form of this layout here
        self.device_plans: dict[object, Any] = {}  # the device kernels theirs, by kernel set

    def encode(
        self,
        grad: Tensor,
        residuals: Residuals | Tensor | Sequence[Tensor | None] | None = None,
        *,
        out: Tensor | None = None,
        prescale: float = 1.0,
        verify: bool = True,
        keep_idle: bool = False,
        kernels: str | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """The wire of grad * prescale + residuals: all frames, in peer order.

        Overwrites the residuals' outputs with what the wire leaves out, and `out`, if given, with
        the wire. `verify` adds checksums. With `keep_idle`, a segment whose gradient is all zeros
        did not take part in this step: it sends zeros and keeps its residual. `residuals` may be
        anything that Residuals accepts; building a Residuals once avoids checking every tensor at
        every step. Here and in the decoders, CuPy arrays may replace tensors; the result is then a
        CuPy array.
        """
        if not isinstance(grad, Tensor) and cupy_arrays.is_array(grad):
            arrays = {"grad": grad, "residuals": residuals, "out": out}
            settings = {"prescale": prescale, "verify": verify, "keep_idle": keep_idle}
            settings |= {"kernels": kernels, "threads": threads}
            return cupy_arrays.call(self.encode, arrays, settings)
        start = arguments.flat_address(grad, self.span, "gradient", arguments.GRADIENT_DTYPES)
        end = start + self.span * grad.element_size()
        device = grad.device
        if residuals is not None:
            if not isinstance(residuals, Residuals):
                residuals = Residuals(self, residuals)
            residuals.check(self, device)
            residuals.expect_apart("the gradient", start, end)
        if type(prescale) is not float or prescale != 1.0:
            prescale = arguments.fp32_factor(prescale)
        if out is None:
            wire = torch.empty(self.wire_nbytes, dtype=torch.uint8, device=device)
        else:
            wire = self._checked_out(out, device, start, end, residuals)
        threads = arguments.thread_count(threads)
        call = EncodeCall(grad, residuals, wire, prescale, bool(verify), threads, keep_idle)
        kernel_sets.select(device, kernels).encode(self, call)
        return wire

    def decode(
        self,
        wire: Tensor,
        *,
        out: Tensor | None = None,
        verify: bool = True,
        kernels: str | None = None,
        threads: int | None = None,
        faults: Tensor | None = None,
    ) -> Tensor:
        """decode_sum of a single wire."""
        return self.decode_sum(
            (wire,), out=out, verify=verify, kernels=kernels, threads=threads, faults=faults
        )

    def decode_sum(
        self,
        wires: Sequence[Tensor] | Tensor,
        *,
        out: Tensor | None = None,
        verify: bool = True,
        kernels: str | None = None,
        threads: int | None = None,
        faults: Tensor | None = None,
    ) -> Tensor:
        """The fp32 sum of wires (a sequence, or the rows of a 2-D tensor), in their order.

        Overwrites only the segments' elements of `out`; without `out`, other elements are 0. A
        malformed wire raises a WireError and leaves `out` undefined. With `faults`, a single int64
        on the device, asynchronous kernels report a bad wire by lowering that number instead of
        waiting for the device (see zcomm.engine.faults).
        """
        if not isinstance(wires, Tensor) and cupy_arrays.has_arrays(wires):
            arrays = {"wires": wires, "out": out, "faults": faults}
            settings = {"verify": verify, "kernels": kernels, "threads": threads}
            return cupy_arrays.call(self.decode_sum, arrays, settings)
        rows, starts = self._checked_wires(wires)
        device = rows[0].device
        if out is None:
            make = torch.empty if self.numel == self.span else torch.zeros
            out = make(self.span, dtype=torch.float32, device=device)
        else:
            first = arguments.flat_address(out, self.span, "out", arguments.OUTPUT_DTYPES)
            arguments.expect_device("out", device, out)
            end = first + self.span * out.element_size()
            for i, start in enumerate(starts):
                if start < end and first < start + self.wire_nbytes:
                    raise arguments.overlap("out", f"wire {i}")
        if faults is not None:
            arguments.expect_fault_number(faults, device)
        threads = arguments.thread_count(threads)
        call = DecodeCall(rows, out, bool(verify), threads, faults)
        kernel_sets.select(device, kernels).decode_sum(self, call)
        return out

    def decode_frames(
        self,
        frames: Sequence[Tensor],
        *,
        out: Tensor,
        verify: bool = True,
        threads: int | None = None,
    ) -> Tensor:
        """decode of a wire whose frames lie apart in memory, each as for frame(). CPU only."""
        self.expect_frames(frames)
        arguments.flat_address(out, self.span, "out", arguments.OUTPUT_DTYPES)
        threads = arguments.thread_count(threads)
        call = DecodeCall(frames, out, bool(verify), threads, apart=True)
        kernel_sets.select(out.device, None).decode_sum(self, call)
        return out

    def expect_frames(self, frames: Sequence[Tensor]) -> None:
        """Refuses frames of another layout by their sizes."""
        sizes = tuple(frame.numel() for frame in frames)
        if sizes != self.frame_nbytes:
            raise WireError(f"expected frames of {self.frame_nbytes} bytes, got {sizes}")

    def for_peer(self, peer: int) -> "Layout":
        """The layout with which peer `peer` decodes: its segments, packed from offset 0.

        It has one frame, whose bytes are those of this layout's frame for that peer.
        """
        return Layout(packed(self.segments, self._checked_peer(peer)))

    def frame(self, wire: Tensor, peer: int) -> Tensor:
        """The frame for one peer, as a view of this layout's wire."""
        if not isinstance(wire, Tensor) and cupy_arrays.is_array(wire):
            return cupy_arrays.call(self.frame, {"wire": wire}, {"peer": peer})
        arguments.bytes_address(wire, "wire")
        if wire.numel() != self.wire_nbytes:
            raise WireError(f"expected a wire of {self.wire_nbytes} bytes, got {wire.numel()}")
        frame = self.frames[self._checked_peer(peer)]
        return wire[frame.start : frame.start + frame.nbytes]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or (self.peers, self.segments) == (other.peers, other.segments)

    def __hash__(self) -> int:
        return hash((self.peers, self.segments))

    def __repr__(self) -> str:
        return (
            f"<Layout: {len(self.segments)} segments, {self.peers} peers, {self.wire_nbytes} bytes>"
        )

    def __reduce__(self) -> tuple[object, ...]:
        # The native form is not pickled: it holds no state and is rebuilt on demand.
        return Layout, (self.segments, self.peers)

    def _checked_peer(self, peer: int) -> int:
        peer = arguments.count(peer, "a peer")
        if peer >= self.peers:
            raise ValueError(f"expected a peer < {self.peers}, got {peer}")
        return peer

    def _checked_out(
        self, out: Tensor, device: torch.device, start: int, end: int, residuals: Residuals | None
    ) -> Tensor:
        """Checks `out`, which receives the wire; start and end are the gradient's addresses."""
        first = arguments.bytes_address(out, "out")
        if out.numel() != self.wire_nbytes:
            raise ValueError(f"expected out of {self.wire_nbytes} bytes, got {out.numel()}")
        arguments.expect_device("out", device, out)
        last = first + self.wire_nbytes
        if first < end and start < last:
            raise arguments.overlap("out", "the gradient")
        if residuals is not None:
            residuals.expect_apart("out", first, last)
        return out

    def _checked_wires(
        self, wires: Sequence[Tensor] | Tensor
    ) -> tuple[Sequence[Tensor], list[int]]:
        """The wires as a sequence, and their addresses."""
        rows = _rows(wires)
        device = getattr(rows[0], "device", None)
        starts: list[int] = []
        for i, row in enumerate(rows):
            starts.append(arguments.bytes_address(row, "wire ", i))
            if row.numel() != self.wire_nbytes:
                message = f"wire {i}: expected {self.wire_nbytes} bytes, got {row.numel()}"
                raise WireError(message, i)
            if row.device != device:
                arguments.expect_device(f"wire {i}", rows[0].device, row)
        return rows, starts


def _rows(wires: Sequence[Tensor] | Tensor) -> Sequence[Tensor]:
    expected = "expected a list of wires or a 2-D tensor"
    if isinstance(wires, Tensor):
        arguments.expect_tensor(wires, "wires")
        if wires.dim() != 2:
            raise ValueError(f"{expected}, got shape {tuple(wires.shape)}")
        wires = wires.unbind(0)
    elif not isinstance(wires, Sequence) or isinstance(wires, (str, bytes, bytearray)):
        raise TypeError(f"{expected}, got {arguments.describe(wires)}; use list(wires)")
    if not wires:
        raise ValueError("expected at least 1 wire, got 0")
    return wires


__all__ = ["Layout", "Residuals", "Segment"]
