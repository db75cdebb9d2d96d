"""RawLayout: sends fp64 uncompressed. It has a Layout's interface, but frames hold only numbers."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from zcomm.wire.segments import Segment, checked_segments, checked_span, packed, peer_count

_ITEMSIZE = 8


class RawLayout:
    """The fp64 counterpart of Layout: no codec, residual or checksum; sums are in fp64.

    Its methods accept a Layout's arguments and ignore those that do not apply.
    """

    def __init__(self, segments: Iterable[Segment], peers: int | None = None) -> None:
        self.segments = checked_segments(segments)
        self.peers = peer_count(self.segments, peers)
        self.numel = sum(s.numel for s in self.segments)
        self.span = checked_span(self.segments)
        inside = [[s for s in self.segments if s.peer == p] for p in range(self.peers)]
        self.frame_nbytes = tuple(_ITEMSIZE * sum(s.numel for s in part) for part in inside)
        self.wire_nbytes = sum(self.frame_nbytes)
        self._ordered = [s for part in inside for s in part]
        self._starts = list(accumulate((s.numel for s in self._ordered), initial=0))

    def encode(
        self, grad: Tensor, *_: object, out: Tensor, prescale: float = 1.0, **__: object
    ) -> Tensor:
        """grad * prescale, in frame order; overwrites `out`."""
        numbers = out.view(torch.float64)
        for s, start in zip(self._ordered, self._starts):
            part = grad[s.offset : s.offset + s.numel]
            torch.mul(part, prescale, out=numbers[start : start + s.numel])
        return out

    def decode_sum(self, wires: Sequence[Tensor], *, out: Tensor, **_: object) -> Tensor:
        """The sum of wires, in their order; overwrites the segments' elements of `out`."""
        first, *others = (wire.view(torch.float64) for wire in wires)
        for s, start in zip(self._ordered, self._starts):
            target = out[s.offset : s.offset + s.numel]
            target.copy_(first[start : start + s.numel])
            for other in others:
                target += other[start : start + s.numel]
        return out

    def decode(self, wire: Tensor, *, out: Tensor, **_: object) -> Tensor:
        return self.decode_sum((wire,), out=out)

    def decode_frames(self, frames: Sequence[Tensor], *, out: Tensor, **_: object) -> Tensor:
        return self.decode(torch.cat(list(frames)), out=out)

    def for_peer(self, peer: int) -> "RawLayout":
        return RawLayout(packed(self.segments, peer))
