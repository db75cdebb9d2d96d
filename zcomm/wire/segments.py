"""Segment, and the placement of segments in the frames of a wire."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zcomm.base.arguments import count, describe
from zcomm.wire.header import ALIGNMENT, HEADER_NBYTES, MAX_UNITS, Frame, codec_byte, layout_hash


class Encoded(NamedTuple):
    """One encoded segment."""

    body: Tensor  # uint8, every section padded to 16 bytes
    decoded: Tensor  # fp32 [n]: subtracted from v to give the residual
    kept: Tensor  # bool [n]: elements whose residual does not change


class SegmentCodec(Protocol):
    """What segments and kernel sets need from a codec."""

    id: int
    spec: str
    log2_block: int

    def k(self, n: int) -> int: ...
    def body_nbytes(self, n: int) -> int: ...
    def residual_numel(self, n: int, dtype: torch.dtype) -> int: ...
    def encode_body(self, v: Tensor) -> Encoded: ...
    def decode_body(self, body: Tensor, n: int) -> Tensor: ...
    def finish_sum(self, terms: Tensor, n: int) -> Tensor: ...
    def read_residual(self, stored: Tensor, n: int) -> Tensor: ...
    def write_residual(self, r: Tensor, kept: Tensor, stored: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Segment:
    """`numel` elements at `offset` of the gradient, encoded with one codec for one peer."""

    codec: SegmentCodec
    numel: int
    offset: int = 0
    peer: int = 0

    def __post_init__(self) -> None:
        if not hasattr(self.codec, "body_nbytes"):
            raise TypeError(
                f"Segment: expected a Codec, got {describe(self.codec)}; use zcomm.codec(...)"
            )
        for field in ("numel", "offset", "peer"):
            given = getattr(self, field)
            remedy = "; use x.numel()" if field == "numel" else ""
            object.__setattr__(self, field, count(given, f"a segment's {field}", remedy=remedy))


def checked_segments(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """The segments as a tuple; refuses objects that are not segments."""
    if not isinstance(segments, Iterable):
        remedy = "; use [segment]" if isinstance(segments, Segment) else ""
        raise TypeError(f"Layout: expected a list of segments, got {describe(segments)}{remedy}")
    checked = tuple(segments)
    for i, segment in enumerate(checked):
        if not isinstance(segment, Segment):
            raise TypeError(f"Layout: expected a Segment at {i}, got {describe(segment)}")
    return checked


def peer_count(segments: Sequence[Segment], peers: int | None) -> int:
    """`peers`, or by default as many as the segments need; refuses fewer."""
    needed = max((s.peer for s in segments), default=0) + 1
    if peers is not None and count(peers, "peers") < needed:
        raise ValueError(f"Layout: expected peers >= {needed} for these segments, got {peers}")
    return needed if peers is None else int(peers)


def checked_span(segments: Sequence[Segment]) -> int:
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


def place(segments: Sequence[Segment], peers: int) -> tuple[tuple[Frame, ...], tuple[int, ...]]:
    """The frames, one per peer, and where each segment's body starts in the wire."""
    members: list[list[int]] = [[] for _ in range(peers)]
    for i, segment in enumerate(segments):
        members[segment.peer].append(i)
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


def packed(segments: Iterable[Segment], peer: int) -> list[Segment]:
    """One peer's segments, packed from offset 0 and renumbered as peer 0's."""
    own = [s for s in segments if s.peer == peer]
    offsets = accumulate((s.numel for s in own), initial=0)
    return [Segment(s.codec, s.numel, offset) for s, offset in zip(own, offsets)]
