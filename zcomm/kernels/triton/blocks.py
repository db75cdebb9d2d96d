"""The kernels of codecs with blocks: a program takes STEPS times ROWS blocks of 2^LOG2 elements.

uniform.py (int8, int4), fp8.py, lm.py and sign.py have what differs between codecs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zcomm.kernels.triton import fp8, lm, sign, uniform
from zcomm.kernels.triton.arguments import DECODE_ARGUMENTS, ENCODE_ARGUMENTS
from zcomm.kernels.triton.bits import (
    BF16_MAX,
    BF16_NAN,
    INF,
    SCALE_MIN,
    bf16_value,
    bits,
    canonical,
    negative_zeros,
)
from zcomm.kernels.triton.block import absmax
from zcomm.kernels.triton.codes import load_codes, load_scales, store_codes, store_scales
from zcomm.kernels.triton.frame import (
    FAULT_CODE,
    FAULT_CODES_NOT_ZERO,
    FAULT_PADDING,
    FAULT_SCALE,
    NO_FAULT,
    PARTS,
    add_part,
    add_parts,
    finish_decode,
    finish_encode,
    refuse_body,
    wire_at,
)
from zcomm.kernels.triton.padding import check_padding
from zcomm.kernels.triton.tile import (
    CHECKSUM,
    FRAME,
    OFFSET,
    SECTION,
    TILES,
    USED,
    block_lengths,
    elements_left,
    ints_at,
    own_tile,
    places,
    store_zeros,
)
from zcomm.kernels.triton.values import (
    clear_residual_paddings,
    load_rows,
    residual_kind,
    store_residual,
)
from zcomm.wire.header import CODEC_IDS

INT8: tl.constexpr = tl.constexpr(CODEC_IDS["int8"])
FP8: tl.constexpr = tl.constexpr(CODEC_IDS["fp8"])
INT4: tl.constexpr = tl.constexpr(CODEC_IDS["int4"])
LM4: tl.constexpr = tl.constexpr(CODEC_IDS["lm4"])
LM2: tl.constexpr = tl.constexpr(CODEC_IDS["lm2"])
SIGN: tl.constexpr = tl.constexpr(CODEC_IDS["sign"])


@triton.jit
def quantise(
    tables: tl.tensor,
    v: tl.tensor,
    peak: tl.tensor,
    m: tl.tensor,
    CODEC: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Finite blocks' scales, codes, and what the codes leave out."""
    if CODEC == INT8 or CODEC == INT4:
        return uniform.quantise(v, peak, WIDTH)
    elif CODEC == FP8:
        return fp8.quantise(v, peak)
    elif CODEC == SIGN:
        return sign.quantise(v, peak, m, ROWS, LOG2)
    else:
        return lm.quantise(tables, v, peak, m, WIDTH, ROWS, LOG2)


@triton.jit
def encode_rows(
    tables: tl.tensor,
    grad: tl.tensor,
    wire: tl.tensor,
    residual_in: tl.tensor,
    residual_out: tl.tensor,
    prescale: tl.tensor,
    flags: tl.tensor,
    row: tl.tensor,
    segment: tl.tensor,
    kind: tl.tensor,
    first: tl.tensor,
    CODEC: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> tl.tensor:
    """Encodes the blocks from element `first` on. Returns their checksum."""
    v, at, valid, m, raw, old = load_rows(
        grad, residual_in, prescale, flags, row, segment, kind, first, ROWS, LOG2
    )
    peak = absmax(v)
    finite = peak < INF
    v, peak = tl.where(finite[:, None], v, 0.0), tl.where(finite, peak, 0)
    scale, codes, e = quantise(tables, v, peak, m, CODEC, WIDTH, ROWS, LOG2)
    scale = tl.where(finite, scale, BF16_NAN)
    sum = store_codes(row, wire, first, codes, WIDTH, ROWS, LOG2)
    sum += store_scales(row, wire, first, scale, m, ROWS, LOG2)
    kept = (at >= 0) & (finite == 0)[:, None]
    store_residual(
        residual_out, kind, row, segment, first, at, valid, m, raw, old, kept, e, ROWS, LOG2
    )
    return sum


@triton.jit(do_not_specialize=ENCODE_ARGUMENTS)
def encode_blocks(
    tables: tl.int64,
    tiles: tl.int64,
    scratch: tl.int64,
    grad: tl.int64,
    wire: tl.int64,
    residual_in: tl.int64,
    residual_out: tl.int64,
    prescale: tl.int64,
    flags: tl.int64,
    CODEC: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> None:
    segment, tile, row = own_tile(tables, tiles)
    kind = residual_kind(tables, scratch, residual_in, segment, flags)
    sum = tile * 0
    for step in range(STEPS):
        first = (tile * STEPS + step) * (ROWS << LOG2)
        sum += encode_rows(
            tables, grad, wire, residual_in, residual_out, prescale, flags, row, segment, kind,
            first, CODEC, WIDTH, ROWS, LOG2,
        )  # fmt: skip
    if tile + 1 == tl.load(row + TILES):
        store_zeros(wire + tl.load(row + SECTION), tl.load(row + USED))
        clear_residual_paddings(residual_out, kind, row, segment)
    finish_encode(tables, scratch, wire, tl.load(row + FRAME), sum, flags & CHECKSUM)


@triton.jit
def value(codes: tl.tensor, CODEC: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """The values of codes, in units of the scale."""
    if CODEC == INT8 or CODEC == INT4:
        return uniform.value(codes, WIDTH)
    elif CODEC == FP8:
        return fp8.value(codes)
    elif CODEC == SIGN:
        return sign.value(codes)
    else:
        return lm.value(codes, WIDTH)


@triton.jit
def unused(codes: tl.tensor, CODEC: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Whether a code is invalid."""
    if CODEC == INT8 or CODEC == INT4:
        return uniform.unused(codes, WIDTH)
    elif CODEC == FP8:
        return fp8.unused(codes)
    else:
        return codes < 0


@triton.jit
def findings(
    codes: tl.tensor,
    scale: tl.tensor,
    m: tl.tensor,
    CODEC: tl.constexpr,
    WIDTH: tl.constexpr,
    LOG2: tl.constexpr,
) -> tl.tensor:
    """The least fault of a wire's part: kind and detail, or NO_FAULT."""
    PIECE: tl.constexpr = 4 if WIDTH == 8 else 2 if WIDTH == 4 else 1  # bytes that are read at once
    count = m
    if CODEC >= LM4 and CODEC <= LM2:
        size, _ = lm.sizes(m, LOG2)
        count = tl.where(m > 0, size, 0)
    i = tl.arange(0, 1 << LOG2)[None, :]
    nbytes = ((count * WIDTH + 7) // 8 + (PIECE - 1)) & -PIECE
    read = i * WIDTH // 8 < nbytes[:, None]
    normal = (scale >= SCALE_MIN) & (scale <= BF16_MAX)
    known = normal | (scale == 0) | (scale == BF16_NAN)
    low = tl.where((i >= count[:, None]) & (codes != 0), FAULT_PADDING, NO_FAULT)
    dead = (normal == 0)[:, None] & read & (codes != 0)
    low = tl.where(dead, FAULT_CODES_NOT_ZERO | scale[:, None], low)
    low = tl.where(read & unused(codes, CODEC, WIDTH), FAULT_CODE, low)
    low = tl.where(known[:, None], low, FAULT_SCALE | scale[:, None])
    return tl.min(low)


@triton.jit
def decode_rows(
    tables: tl.tensor,
    scratch: tl.tensor,
    wires: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    out: tl.tensor,
    fault: tl.tensor,
    verify: tl.tensor,
    row: tl.tensor,
    segment: tl.tensor,
    first: tl.tensor,
    ends: tl.tensor,
    parts: tl.tensor,
    CODEC: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> tl.tensor:
    """Decodes the blocks from element `first` on, the segment's last ones if it `ends` there.
    Returns the wires' checksums with their parts added."""
    left = elements_left(row, first, ROWS << LOG2)
    m = block_lengths(left, ROWS, LOG2)
    total = negative_zeros([ROWS, 1 << LOG2])  # -0 + x is x
    for w in range(count):
        wire = wire_at(wires, stride, w)
        scale, sum = load_scales(row, wire, first, m, ROWS, LOG2)
        codes, more = load_codes(row, wire, first, WIDTH, ROWS, LOG2)
        sum += more
        low = findings(codes, scale, m, CODEC, WIDTH, LOG2)
        if ends:
            nonzero, more = check_padding(row, wire, 0)
            low = tl.where(nonzero, tl.minimum(low, FAULT_PADDING), low)
            sum += more
        refuse_body(fault, w, segment, low)
        parts = add_part(tables, scratch, tl.load(row + FRAME), w, sum, parts, verify)
        # A zero block decodes to 0, whatever code 0 stands for.
        s = scale[:, None]
        total += tl.where(s == 0, 0.0, value(codes, CODEC, WIDTH) * bf16_value(s))
    if CODEC >= LM4 and CODEC <= LM2:
        total = lm.restore(tables, total, m, ROWS, LOG2)
    at = places(ROWS, 1 << LOG2)
    to = ints_at(out + (tl.load(row + OFFSET) + first) * 4)
    tl.store(to + at, bits(canonical(total)), mask=at < left)
    return parts


@triton.jit(do_not_specialize=DECODE_ARGUMENTS)
def decode_blocks(
    tables: tl.int64,
    tiles: tl.int64,
    scratch: tl.int64,
    wires: tl.int64,
    stride: tl.int64,
    count: tl.int64,
    out: tl.int64,
    fault: tl.int64,
    verify: tl.int64,
    CODEC: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2: tl.constexpr,
) -> None:
    segment, tile, row = own_tile(tables, tiles)
    parts = tl.zeros([PARTS], tl.int64)
    for step in range(STEPS):
        first = (tile * STEPS + step) * (ROWS << LOG2)
        ends = (tile + 1 == tl.load(row + TILES)) & (step == STEPS - 1)
        parts = decode_rows(
            tables, scratch, wires, stride, count, out, fault, verify, row, segment, first, ends,
            parts, CODEC, WIDTH, ROWS, LOG2,
        )  # fmt: skip
    frame = tl.load(row + FRAME)
    add_parts(tables, scratch, frame, count, parts, verify)
    finish_decode(tables, scratch, wires, stride, count, frame, fault, verify)
