"""Kernels of one warp that move 8x8 matrices by ldmatrix and stmatrix, and what they must leave.

Shared memory has 32 rows of 16 bytes. Lane l gives the address of row 5 l % 32.
"""

from __future__ import annotations

# %r1 lane; %r5 the address of its own row, %r6 that of the row that it names.
PLACES = (
    "mov.u32 %r5, dynamic; shl.b32 %r7, %r1, 4; mul.lo.u32 %r8, %r1, 80; and.b32 %r8, %r8, 511;"
    "add.u32 %r6, %r5, %r8; add.u32 %r5, %r5, %r7; cvt.u64.u32 %rd6, %r7; add.u64 %rd6, %rd2, %rd6;"
)
# Half j of shared memory is j.
COUNTING = (
    "mul.lo.u32 %r10, %r1, 0x80008; add.u32 %r10, %r10, 0x10000; add.u32 %r11, %r10, 0x20002;"
    "add.u32 %r12, %r11, 0x20002; add.u32 %r13, %r12, 0x20002;"
    "st.shared.v4.b32 [%r5], {%r10, %r11, %r12, %r13}; bar.sync 0;"
)
# Part m of lane l is m, l in the low half and 0x80 + m, l in the high one.
PARTS = "or.b32 %r10, %r1, 0x80000000; shl.b32 %r11, %r1, 16; or.b32 %r10, %r10, %r11;" + "".join(
    f"add.u32 %r{10 + m}, %r{9 + m}, 0x01000100;" for m in (1, 2, 3)
)
FOUR = "{%r10, %r11, %r12, %r13}"
REGISTERS = {1: "{%r10}", 2: "{%r10, %r11}", 4: FOUR}


def name(opcode: str, count: int, transposed: bool) -> str:
    return f"{opcode}_x{count}" + ("_trans" if transposed else "")


def load(count: int, transposed: bool) -> str:
    trans = ".trans" if transposed else ""
    code = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {REGISTERS[count]}, [%r6];"
    zeros = "".join(f"mov.u32 %r{10 + m}, 0;" for m in range(4))
    return PLACES + COUNTING + zeros + code + f"st.global.v4.b32 [%rd6], {FOUR};"


def store(count: int, transposed: bool) -> str:
    trans = ".trans" if transposed else ""
    code = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r6], {REGISTERS[count]};"
    back = f"bar.sync 0; ld.shared.v4.b32 {FOUR}, [%r5]; st.global.v4.b32 [%rd6], {FOUR};"
    return PLACES + COUNTING + PARTS + code + back


SHAPES = [(count, transposed) for count in (1, 2, 4) for transposed in (False, True)]
KERNELS = {name("ldmatrix", *shape): load(*shape) for shape in SHAPES}
KERNELS |= {name("stmatrix", *shape): store(*shape) for shape in SHAPES}


def places(count: int, transposed: bool) -> dict[tuple[int, int, int], int]:
    """By lane, matrix and half of a register: which half of shared memory it is."""
    found = {}
    for lane in range(32):
        for m in range(count):
            for i in (0, 1):
                row, column = lane // 4, 2 * (lane % 4) + i
                if transposed:
                    row, column = column, row
                found[lane, m, i] = 8 * ((8 * m + row) * 5 % 32) + column
    return found


def loaded(count: int, transposed: bool) -> list[int]:
    words = [0] * 128
    for (lane, m, i), half in places(count, transposed).items():
        words[4 * lane + m] |= half << (16 * i)
    return words


def stored(count: int, transposed: bool) -> list[int]:
    halves = list(range(256))
    for (lane, m, i), half in places(count, transposed).items():
        halves[half] = (0x8000 if i else 0) + 256 * m + lane
    return [low | high << 16 for low, high in zip(halves[::2], halves[1::2])]
