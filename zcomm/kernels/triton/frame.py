"""What the tiles of a frame share: checksums, faults, and the header, which the last tile writes or
checks. No program waits for another.

Scratch memory is zero before and after every call.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zcomm.kernels.triton.tile import FRAMES, frame_at, words_at

# The numbers of csrc/cuda/args.h. Faults of bodies belong to the stage that is reported last.
FAULT_CHECKSUM: tl.constexpr = tl.constexpr((1 << 62) | (1 << 16))
FAULT_BODY: tl.constexpr = tl.constexpr(-(1 << 63))
FAULT_SCALE: tl.constexpr = tl.constexpr(2 << 16)
FAULT_CODE: tl.constexpr = tl.constexpr(3 << 16)
FAULT_CODES_NOT_ZERO: tl.constexpr = tl.constexpr(4 << 16)
FAULT_PADDING: tl.constexpr = tl.constexpr(5 << 16)
FAULT_TOPK_COUNT: tl.constexpr = tl.constexpr(6 << 16)
FAULT_TOPK_FLAGS: tl.constexpr = tl.constexpr(7 << 16)
FAULT_TOPK_TOTAL: tl.constexpr = tl.constexpr(8 << 16)
FAULT_TOPK_OFFSET: tl.constexpr = tl.constexpr(9 << 16)
FAULT_TOPK_VALUE: tl.constexpr = tl.constexpr(10 << 16)
FAULT_TOPK_ENTRIES: tl.constexpr = tl.constexpr(11 << 16)
NO_FAULT: tl.constexpr = tl.constexpr(0x7FFFFFFF)

# A program sums the checksums of this many wires before it adds them to the frame's.
PARTS: tl.constexpr = tl.constexpr(32)

HAS_CHECKSUM: tl.constexpr = tl.constexpr(1 << 56)  # in a header's first word


@triton.jit
def part(piece: tl.tensor, byte: tl.tensor) -> tl.tensor:
    """A piece's share of the sum of word_i * (2 i + 1); `byte` is its place in the frame.

    A piece is an unsigned number in an int64, and lies in one word.
    """
    return (piece << (8 * (byte & 7))) * (2 * (byte >> 3) + 1)


@triton.jit
def is_last(done: tl.tensor, tiles: tl.tensor) -> tl.tensor:
    """Whether this is the last of a frame's programs to arrive. If so, resets the count."""
    last = tl.atomic_add(done, 1) + 1 == tiles
    if last:
        tl.atomic_xchg(done, 0)
    return last


@triton.jit
def finish_encode(
    tables: tl.tensor,
    scratch: tl.tensor,
    wire: tl.tensor,
    frame: tl.tensor,
    sum: tl.tensor,
    checksum: tl.tensor,
) -> None:
    """Adds the program's part of the checksum to the frame; its last tile writes the header."""
    row = frame_at(tables, frame)
    total = words_at(scratch) + frame
    if checksum:
        tl.atomic_add(total, sum)
    done = total + tl.load(words_at(tables) + FRAMES)
    if is_last(done, tl.load(row + 1)):
        to = words_at(wire + tl.load(row))
        word_0 = tl.load(row + 2)
        word_1, word_2 = tl.load(row + 3), tl.load(row + 4)
        word_3 = word_0 * 0
        if checksum:
            word_0 = word_0 | HAS_CHECKSUM
            word_3 = tl.atomic_xchg(total, 0) + word_0 + word_1 * 3 + word_2 * 5
        tl.store(to, word_0)
        tl.store(to + 1, word_1)
        tl.store(to + 2, word_2)
        tl.store(to + 3, word_3)


@triton.jit
def wire_at(wires: tl.tensor, stride: tl.tensor, w: tl.tensor) -> tl.tensor:
    """The address of wire w: they lie `stride` apart, or there is a table (stride 0)."""
    address = wires + stride * w
    if stride == 0:
        address = tl.load(words_at(wires) + w)
    return address


@triton.jit
def refuse(fault: tl.tensor, key: tl.tensor) -> None:
    """Lowers the fault, an unsigned number, to the key."""
    pointer = fault.to(tl.int64).to(tl.pointer_type(tl.uint64))
    tl.atomic_min(pointer, key.to(tl.uint64))


@triton.jit
def refuse_body(fault: tl.tensor, w: tl.tensor, segment: tl.tensor, low: tl.tensor) -> None:
    """`low`: the kind and the detail, or NO_FAULT."""
    if low != NO_FAULT:
        place = (tl.cast(w, tl.int64) << 48) | (segment << 24)
        refuse(fault, place | low | FAULT_BODY)


@triton.jit
def add_sum(
    tables: tl.tensor,
    scratch: tl.tensor,
    frame: tl.tensor,
    w: tl.tensor,
    sum: tl.tensor,
    verify: tl.tensor,
) -> None:
    """Adds to the checksum of wire w."""
    if verify:
        frames = tl.load(words_at(tables) + FRAMES)
        tl.atomic_add(words_at(scratch) + frames * (w + 1) + frame, sum)


@triton.jit
def add_part(
    tables: tl.tensor,
    scratch: tl.tensor,
    frame: tl.tensor,
    w: tl.tensor,
    sum: tl.tensor,
    parts: tl.tensor,
    verify: tl.tensor,
) -> tl.tensor:
    """Adds to the program's checksum of wire w; beyond PARTS wires, to the frame's at once."""
    if w >= PARTS:
        add_sum(tables, scratch, frame, w, sum, verify)
    return parts + tl.where(tl.arange(0, PARTS) == w, sum, 0)


@triton.jit
def add_parts(
    tables: tl.tensor,
    scratch: tl.tensor,
    frame: tl.tensor,
    count: tl.tensor,
    parts: tl.tensor,
    verify: tl.tensor,
) -> None:
    if verify:
        frames = tl.load(words_at(tables) + FRAMES)
        w = tl.arange(0, PARTS)
        tl.atomic_add(words_at(scratch) + frames * (w + 1) + frame, parts, mask=w < count)
        tl.debug_barrier()  # before one lane reports that all is done


@triton.jit
def wrong_field(
    word_0: tl.tensor,
    word_1: tl.tensor,
    word_2: tl.tensor,
    word_3: tl.tensor,
    row: tl.tensor,
    verify: tl.tensor,
) -> tl.tensor:
    """The first field of a header that is not as expected, or -1. Earlier fields win."""
    other = word_0 ^ tl.load(row + 2)
    units = word_2 ^ tl.load(row + 4)
    has_checksum = (word_0 & HAS_CHECKSUM) != 0
    field = tl.where((word_3 != 0) & (has_checksum == 0), 8, -1)
    field = tl.where((units >> 32) != 0, 7, field)
    field = tl.where((units & 0xFFFFFFFF) != 0, 6, field)
    field = tl.where(word_1 != tl.load(row + 3), 5, field)
    field = tl.where((has_checksum == 0) & (verify != 0), 4, field)
    field = tl.where(((other >> 57) & 0x7F) != 0, 3, field)
    field = tl.where(((other >> 48) & 0xFF) != 0, 2, field)
    field = tl.where(((other >> 32) & 0xFFFF) != 0, 1, field)
    return tl.where((other & 0xFFFFFFFF) != 0, 0, field)


@triton.jit
def check_frame(
    wire: tl.tensor,
    row: tl.tensor,
    total: tl.tensor,
    place: tl.tensor,
    fault: tl.tensor,
    verify: tl.tensor,
) -> None:
    """Checks the header of a wire, and the sum of its body; `place` is the fault's."""
    at = words_at(wire + tl.load(row))
    word_0, word_1 = tl.load(at), tl.load(at + 1)
    word_2, word_3 = tl.load(at + 2), tl.load(at + 3)
    field = wrong_field(word_0, word_1, word_2, word_3, row, verify)
    if field >= 0:
        refuse(fault, place | field)
    if verify:
        sum = tl.atomic_xchg(total, 0) + word_0 + word_1 * 3 + word_2 * 5
        if sum != word_3:
            refuse(fault, place | FAULT_CHECKSUM)


@triton.jit
def finish_decode(
    tables: tl.tensor,
    scratch: tl.tensor,
    wires: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    frame: tl.tensor,
    fault: tl.tensor,
    verify: tl.tensor,
) -> None:
    """The last tile of a frame checks headers and checksums."""
    row = frame_at(tables, frame)
    done = words_at(scratch) + frame
    if is_last(done, tl.load(row + 1)):
        frames = tl.load(words_at(tables) + FRAMES)
        for w in range(count):
            place = (tl.cast(w, tl.int64) << 48) | (frame << 24)
            wire = wire_at(wires, stride, w)
            check_frame(wire, row, done + frames * (w + 1), place, fault, verify)
