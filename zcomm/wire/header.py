"""The frame: its header, its checksum, and the error for a refused wire.

| offset | size | field    |
| ------ | ---- | -------- |
| 0      | 4    | magic    |
| 4      | 2    | version  |
| 6      | 1    | codec    |
| 7      | 1    | flags    |
| 8      | 8    | elements |
| 16     | 4    | units    |
| 20     | 4    | layout   |
| 24     | 8    | checksum |

    checksum = sum over i != 3 of word_i * (2i + 1)  mod 2^64
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

MAGIC = b"ZCOM"
VERSION = 1
HEADER_NBYTES = 32
ALIGNMENT = 16
FLAG_CHECKSUM = 1
CHECKSUM_WORD = 3
NO_SEGMENTS = 0
MIXED_CODECS = 255
MASK64 = (1 << 64) - 1
MAX_UNITS = (1 << 32) - 1

# A codec's id is its place here, from 1: add new ones at the end.
_CODECS = ("none", "bf16", "fp16", "int8", "fp8", "int4", "lm4", "lm3", "lm2", "sign", "topk")
CODEC_IDS = {name: id_ for id_, name in enumerate(_CODECS, start=1)}
_NAMES = {id_: name for name, id_ in CODEC_IDS.items()}
_NAMES |= {NO_SEGMENTS: "no segments", MIXED_CODECS: "mixed"}

_HEADER = struct.Struct("<4sHBBQIIQ")
_ROW = struct.Struct("<BBQQ")
_FNV_BASIS = 0x811C9DC5
_FNV_PRIME = 0x01000193


class WireError(ValueError):
    """A wire was refused. The fields name the wire and, if known, its frame or segment."""

    def __init__(
        self,
        message: str,
        wire_index: int | None = None,
        frame: int | None = None,
        segment: int | None = None,
    ) -> None:
        super().__init__(message)
        self.wire_index = wire_index
        self.frame = frame
        self.segment = segment

    def __reduce__(self) -> tuple[object, ...]:
        return WireError, (str(self), self.wire_index, self.frame, self.segment)


class Frame(NamedTuple):
    """What both sides know about a frame before any byte is sent."""

    start: int
    nbytes: int
    codec: int
    elements: int
    layout: int


def align16(nbytes: int) -> int:
    """nbytes, rounded up to a multiple of 16."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def codec_name(codec_id: int) -> str:
    return _NAMES.get(codec_id, f"id {codec_id}")


def codec_byte(codec_ids: Iterable[int]) -> int:
    """The header's codec field for segments with these codecs."""
    distinct = set(codec_ids)
    if not distinct:
        return NO_SEGMENTS
    return distinct.pop() if len(distinct) == 1 else MIXED_CODECS


def layout_hash(rows: Iterable[tuple[int, int, int, int]]) -> int:
    """FNV-1a, 32 bits, over (codec id, log2 of the block size, numel, k) of each segment."""
    value = _FNV_BASIS
    for row in rows:
        for byte in _ROW.pack(*row):
            value = ((value ^ byte) * _FNV_PRIME) & 0xFFFFFFFF
    return value


def checksum(frame: Tensor) -> int:
    """The checksum of a whole frame (uint8, 8-byte aligned), except for its checksum field."""
    words = frame.view(torch.int64)
    factors = 2 * torch.arange(words.numel(), dtype=torch.int64, device=frame.device) + 1
    factors[CHECKSUM_WORD] = 0
    # int64 products and sums wrap around, which gives the arithmetic mod 2^64 we need.
    return int((words * factors).sum()) & MASK64


def frame_header(frame: Frame, *, verify: bool, checksum: int = 0) -> bytes:
    """The 32 bytes at the start of a frame; without `verify` there is no checksum."""
    flags = FLAG_CHECKSUM if verify else 0
    units = frame.nbytes // ALIGNMENT
    fields = (frame.codec, flags, frame.elements, units, frame.layout)
    return _HEADER.pack(MAGIC, VERSION, *fields, checksum if verify else 0)


def check_header(header: bytes, frame: Frame, *, verify: bool) -> int:
    """Refuses a header that differs from the expected one; returns the stored checksum."""
    magic, version, codec, flags, elements, units, layout, stored = _HEADER.unpack(header)
    _expect("magic", repr(MAGIC), repr(magic))
    _expect("version", VERSION, version)
    _expect("codec", codec_name(frame.codec), codec_name(codec))
    _expect("elements", frame.elements, elements)
    _expect("frame bytes", frame.nbytes, units * ALIGNMENT)
    _expect("layout", f"{frame.layout:#010x}", f"{layout:#010x}")
    _check_flags(flags, verify)
    if not flags & FLAG_CHECKSUM:
        _expect("checksum", 0, stored)
    return int(stored)


def _check_flags(flags: int, verify: bool) -> None:
    if flags & ~FLAG_CHECKSUM:
        raise WireError(f"expected flags 0 or 1, got {flags:#04x}")
    if verify and not flags & FLAG_CHECKSUM:
        raise WireError(
            "expected a frame with a checksum, got one without; encode with verify=True"
        )


def _expect(field: str, expected: object, got: object) -> None:
    if expected != got:
        raise WireError(f"expected {field} {expected}, got {got}")
