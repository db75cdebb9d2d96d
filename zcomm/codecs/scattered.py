"""ScatteredLayout: a layout whose segments are separate tensors anywhere in memory.

A segment's offset is its distance from the lowest address of all: kernels add it to that address,
as they do in a flat tensor. They never touch memory between segments.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zcomm import kernels as kernel_sets
from zcomm.base.arguments import is_flat
from zcomm.codecs.layout import Layout
from zcomm.kernels.base import DecodeCall, EncodeCall
from zcomm.wire.segments import Segment, SegmentCodec


class ScatteredLayout:
    """Segments (codec, peer) and a flat fp32 tensor for each, whose address is recorded."""

    def __init__(
        self, segments: Sequence[tuple[SegmentCodec, int]], tensors: Sequence[Tensor], peers: int
    ) -> None:
        assert all(is_flat(t, (torch.float32,)) for t in tensors)
        base = min((t.data_ptr() for t in tensors if t.numel()), default=0)
        offsets = [(t.data_ptr() - base) // 4 if t.numel() else 0 for t in tensors]
        self.layout = Layout(
            [Segment(c, t.numel(), o, p) for (c, p), t, o in zip(segments, tensors, offsets)], peers
        )
        device = tensors[0].device if tensors else torch.device("cpu")
        self._memory = _ScatteredTensors(base, dict(zip(offsets, tensors)), device)

    def runs(self, peer: int | None = None) -> list[tuple[int, int]]:
        """Where the segments of a peer (None: of all) lie: address / 4, and elements."""
        first, segments = self._memory.data_ptr() // 4, self.layout.segments
        return [(first + s.offset, s.numel) for s in segments if peer in (None, s.peer)]

    def encode(self, out: Tensor, *, verify: bool, threads: int | None) -> None:
        """Overwrites `out`, of this layout's size, with the wire."""
        kernel_set = kernel_sets.select(out.device, None)
        call = EncodeCall(self._memory, None, out, verify=verify, threads=threads)
        kernel_set.encode(self.layout, call)

    def decode_frames(self, frames: Sequence[Tensor], *, verify: bool, threads: int | None) -> None:
        """Overwrites the tensors with a wire whose frames lie apart."""
        self.layout.expect_frames(frames)
        call = DecodeCall(frames, self._memory, verify, threads, apart=True)
        kernel_sets.select(self._memory.device, None).decode_sum(self.layout, call)

    def decode(
        self, wire: Tensor, *, verify: bool, threads: int | None, faults: Tensor | None = None
    ) -> None:
        """Overwrites the tensors."""
        kernel_set = kernel_sets.select(wire.device, None)
        call = DecodeCall([wire], self._memory, verify, threads, faults)
        kernel_set.decode_sum(self.layout, call)


class _ScatteredTensors:
    """What kernels need from a flat tensor: its address, or its slices."""

    dtype = torch.float32

    def __init__(self, base: int, tensors: dict[int, Tensor], device: torch.device) -> None:
        self._base, self._tensors, self.device = base, tensors, device

    def data_ptr(self) -> int:
        return self._base

    def __getitem__(self, part: slice) -> Tensor:
        return self._tensors[part.start]
