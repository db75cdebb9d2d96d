"""Finds idle segments: their gradient is all zero, they send zeros and keep their residual."""

from __future__ import annotations

import triton
import triton.language as tl

from zcomm.kernels.triton.arguments import ENCODE_ARGUMENTS
from zcomm.kernels.triton.bits import magnitude
from zcomm.kernels.triton.tile import (
    FRAMES,
    OFFSET,
    RESIDUAL_CODES,
    RESIDUAL_SHIFT,
    RESIDUAL_USED,
    N,
    bytes_at,
    segment_at,
    store_zeros,
    words_at,
)
from zcomm.kernels.triton.values import FP32, INT8, load_gradient


@triton.jit
def all_zero(grad: tl.tensor, flags: tl.tensor, row: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """The usual answer comes from the first chunk; only a segment of zeros is read to its end."""
    n, offset = tl.load(row + N), tl.load(row + OFFSET)
    at = tl.arange(0, CHUNK)
    first, found = n * 0, 0
    while (first < n) & (found == 0):
        g = load_gradient(grad, flags, offset + first, at, at < n - first)
        found = tl.max(magnitude(g))
        first += CHUNK
    return found == 0


@triton.jit
def copy_bytes(
    source: tl.tensor, target: tl.tensor, nbytes: tl.tensor, CHUNK: tl.constexpr
) -> None:
    at = tl.arange(0, CHUNK)
    first = nbytes * 0
    while first < nbytes:
        some = tl.load(bytes_at(source + first) + at, mask=at < nbytes - first, other=0)
        tl.store(bytes_at(target + first) + at, some, mask=at < nbytes - first)
        first += CHUNK


@triton.jit
def copy_residual(
    source: tl.tensor, target: tl.tensor, kind: tl.tensor, row: tl.tensor, CHUNK: tl.constexpr
) -> None:
    """Pads the sections of int8 storage to multiples of 16 with 0, as an encode does."""
    if kind == INT8:
        codes, used = tl.load(row + RESIDUAL_CODES), tl.load(row + RESIDUAL_USED)
        copy_bytes(source, target, used, CHUNK)
        store_zeros(target, used)
        n = tl.load(row + N)
        copy_bytes(source + codes, target + codes, n, CHUNK)
        store_zeros(target + codes, n)
    else:
        copy_bytes(source, target, tl.load(row + N) * tl.where(kind == FP32, 4, 2), CHUNK)


@triton.jit(do_not_specialize=ENCODE_ARGUMENTS)
def find_idle(
    tables: tl.int64,
    tiles: tl.int64,
    scratch: tl.int64,
    grad: tl.int64,
    wire: tl.int64,
    residual_in: tl.int64,
    residual_out: tl.int64,
    prescale: tl.int64,
    flags: tl.int64,
    CHUNK: tl.constexpr,
) -> None:
    """One program for each segment of the layout."""
    segment = tl.program_id(0).to(tl.int64)
    row = segment_at(tables, segment)
    source = tl.load(words_at(residual_in) + segment)
    target = tl.load(words_at(residual_out) + segment)
    idle = tl.load(row + N) * 0
    if (source != 0) & (tl.load(row + N) > 0):
        idle = all_zero(grad, flags, row, CHUNK).to(tl.int64)
    to = words_at(scratch) + 2 * tl.load(words_at(tables) + FRAMES) + segment
    tl.store(to, idle)
    if (idle != 0) & (source != target):
        copy_residual(source, target, (flags >> RESIDUAL_SHIFT) & 3, row, CHUNK)
