"""The bytes after a section, up to a multiple of 16. A decoder checks that they are 0."""

from __future__ import annotations

import triton
import triton.language as tl

from zcomm.kernels.triton.frame import part
from zcomm.kernels.triton.tile import SECTION, USED, align16, bytes_at, section_byte


@triton.jit
def check_padding(
    row: tl.tensor, wire: tl.tensor, SECTION_INDEX: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Whether a byte of the section's padding is not 0, and the padding's share of the checksum."""
    used = tl.load(row + USED + SECTION_INDEX)
    at = used + tl.arange(0, 16)
    bytes = bytes_at(wire + tl.load(row + SECTION + SECTION_INDEX))
    padding = tl.load(bytes + at, mask=at < align16(used), other=0).to(tl.int64)
    return tl.max(padding) != 0, tl.sum(part(padding, section_byte(row, SECTION_INDEX, at)))
