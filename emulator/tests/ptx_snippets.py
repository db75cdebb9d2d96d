"""Instructions to try: PTX for a few of them, the operands, and what must come out.

A snippet reads %rd1 to %rd3 (whose low parts are in %r1 to %r3 and %rs1 to %rs3), and leaves
its result in %rd0, %r0, %rs0 or %p0.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

Row = tuple[int, ...]
TO_RD0 = {
    "rd": "",
    "r": "cvt.u64.u32 %rd0, %r0;",
    "rs": "cvt.u64.u16 %rd0, %rs0;",
    "p": "selp.u64 %rd0, 1, 0, %p0;",
}
MAX_ROWS = 1024  # threads of a CTA

KERNEL = """
.visible .entry {name}(.param .align 8 .b8 {name}_param_0[16])
{{
  .reg .pred %p<8>;
  .reg .b16 %rs<16>;
  .reg .b32 %r<32>;
  .reg .b64 %rd<32>;
  ld.param.u64 %rd30, [{name}_param_0];
  ld.param.u64 %rd31, [{name}_param_0+8];
  mov.u32 %r31, %tid.x;
  mad.wide.u32 %rd30, %r31, 24, %rd30;
  mad.wide.u32 %rd31, %r31, 8, %rd31;
  ld.global.u64 %rd1, [%rd30];
  ld.global.u64 %rd2, [%rd30+8];
  ld.global.u64 %rd3, [%rd30+16];
  cvt.u32.u64 %r1, %rd1;
  cvt.u32.u64 %r2, %rd2;
  cvt.u32.u64 %r3, %rd3;
  cvt.u16.u64 %rs1, %rd1;
  cvt.u16.u64 %rs2, %rd2;
  cvt.u16.u64 %rs3, %rd3;
  {code}
  {to_rd0}
  st.global.u64 [%rd31], %rd0;
  ret;
}}
"""
HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"


@dataclass
class Snippet:
    code: str
    result: str  # a key of TO_RD0
    rows: Sequence[Row]
    expected: Sequence[int]

    def kernel(self, name: str) -> str:
        return KERNEL.format(name=name, code=self.code, to_rd0=TO_RD0[self.result])


def table(code: str, result: str, *pairs: tuple[Row | int, int]) -> Snippet:
    """Operands and results, written down."""
    rows = [row if isinstance(row, tuple) else (row,) for row, _ in pairs]
    return Snippet(code, result, rows, [expected for _, expected in pairs])


def formula(
    code: str, result: str, function: Callable[..., int], *values: Sequence[int]
) -> Snippet:
    """All combinations of operands; the result wraps around."""
    rows = list(product(*values))
    assert len(rows) <= MAX_ROWS
    width = {"rd": 64, "r": 32, "rs": 16, "p": 1}[result]
    return Snippet(code, result, rows, [int(function(*row)) & (1 << width) - 1 for row in rows])


def s(value: int, width: int = 32) -> int:
    """The signed integer of these bits."""
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


def f(value: float) -> int:
    """The bits of an fp32."""
    return int.from_bytes(struct.pack("<f", value), "little")


def d(value: float) -> int:
    """The bits of an fp64."""
    return int.from_bytes(struct.pack("<d", value), "little")


def bytes_of(a: int, signed: bool) -> list[int]:
    return [s(a >> i, 8) if signed else a >> i & 255 for i in (0, 8, 16, 24)]


def halves(function: Callable[[int, int], int], signed: bool) -> Callable[[int, int], int]:
    """Of two numbers of 16 bits in each operand."""

    def both(a: int, b: int) -> int:
        read = [(s(x, 16) if signed else x & 0xFFFF) for x in (a, b, a >> 16, b >> 16)]
        return function(*read[:2]) & 0xFFFF | (function(*read[2:]) & 0xFFFF) << 16

    return both


W = (0, 1, 2, 7, 31, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xDEADBEEF, 0xFFFFFFFF)
Q = (0, 1, 5, 0x80000000, 0x7FFFFFFFFFFFFFFF, 1 << 63, 0xDEADBEEF01234567, (1 << 64) - 1)
X = (0, 0x00010002, 0x7FFF8000, 0x80007FFF, 0xFFFF0001, 0xFFFFFFFF, 0xBEEF1234)
H = (0, 1, 0x7FFF, 0x8000, 0xFFFF, 0xBEEF)


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


INTEGERS = {
    "add_s32": formula("add.s32 %r0, %r1, %r2;", "r", lambda a, b: a + b, W, W),
    "sub_u64": formula("sub.u64 %rd0, %rd1, %rd2;", "rd", lambda a, b: a - b, Q, Q),
    "add_s16": formula("add.s16 %rs0, %rs1, %rs2;", "rs", lambda a, b: a + b, H, H),
    "add_sat": formula(
        "add.sat.s32 %r0, %r1, %r2;",
        "r",
        lambda a, b: max(-(1 << 31), min((1 << 31) - 1, s(a) + s(b))),
        W,
        W,
    ),
    "mul_lo_u16": formula("mul.lo.u16 %rs0, %rs1, %rs2;", "rs", lambda a, b: a * b, H, H),
    "mul_lo_s64": formula("mul.lo.s64 %rd0, %rd1, %rd2;", "rd", lambda a, b: a * b, Q, Q),
    "mul_hi_u16": formula("mul.hi.u16 %rs0, %rs1, %rs2;", "rs", lambda a, b: a * b >> 16, H, H),
    "mul_hi_s32": formula("mul.hi.s32 %r0, %r1, %r2;", "r", lambda a, b: s(a) * s(b) >> 32, W, W),
    "mul_hi_u32": formula("mul.hi.u32 %r0, %r1, %r2;", "r", lambda a, b: a * b >> 32, W, W),
    "mul_hi_u64": formula("mul.hi.u64 %rd0, %rd1, %rd2;", "rd", lambda a, b: a * b >> 64, Q, Q),
    "mul_hi_s64": formula(
        "mul.hi.s64 %rd0, %rd1, %rd2;", "rd", lambda a, b: s(a, 64) * s(b, 64) >> 64, Q, Q
    ),
    "mul_wide_s16": formula(
        "mul.wide.s16 %r0, %rs1, %rs2;", "r", lambda a, b: s(a, 16) * s(b, 16), H, H
    ),
    "mul_wide_u32": formula("mul.wide.u32 %rd0, %r1, %r2;", "rd", lambda a, b: a * b, W, W),
    "mul_wide_literal": formula("mul.wide.u32 %rd0, %r1, -3;", "rd", lambda a: a * 0xFFFFFFFD, W),
    "mad_lo": formula("mad.lo.s32 %r0, %r1, %r2, %r3;", "r", lambda a, b, c: a * b + c, W, W, W),
    "mad_hi": formula("mad.hi.u32 %r0, %r1, %r2, 9;", "r", lambda a, b: (a * b >> 32) + 9, W, W),
    "mad_wide_s32": formula(
        "mad.wide.s32 %rd0, %r1, %r2, %rd3;", "rd", lambda a, b, c: s(a) * s(b) + c, W, W, Q
    ),
    "carries": formula(
        "add.cc.u32 %r4, %r1, %r2; addc.cc.u32 %r5, %r1, 0; addc.u32 %r6, 0, 0;"
        "mov.b64 %rd0, {%r5, %r6}; xor.b64 %rd0, %rd0, %rd3;",
        "rd",
        lambda a, b, c: ((a << 32) + a + b >> 32) ^ c,
        W,
        W,
        (0,),
    ),
    "borrows": formula(
        "sub.cc.u32 %r4, 0, %r3; subc.cc.u32 %r5, %r1, %r2; subc.u32 %r6, 0, 0;"
        "mov.b64 %rd0, {%r5, %r6};",
        "rd",
        lambda a, b, c: (a << 32) - (b << 32 | c) >> 32,
        W,
        W,
        (0, 1),
    ),
    "mad_carries": formula(
        "mad.lo.cc.u32 %r4, %r1, %r2, %r3; madc.hi.u32 %r5, %r1, %r2, 0; mov.b64 %rd0, {%r4, %r5};",
        "rd",
        lambda a, b, c: a * b + c,
        W,
        W,
        W,
    ),
    "div_s32": formula("div.s32 %r0, %r1, %r2;", "r", lambda a, b: quotient(s(a), s(b)), W, W[1:]),
    "rem_s32": formula(
        "rem.s32 %r0, %r1, %r2;",
        "r",
        lambda a, b: s(a) - s(b) * quotient(s(a), s(b)),
        W,
        W[1:],
    ),
    "div_u64": formula("div.u64 %rd0, %rd1, %rd2;", "rd", lambda a, b: a // b, Q, Q[1:]),
    "rem_u32": formula("rem.u32 %r0, %r1, %r2;", "r", lambda a, b: a % b, W, W[1:]),
    "min_s32": formula("min.s32 %r0, %r1, %r2;", "r", lambda a, b: min(s(a), s(b)), W, W),
    "min_u32": formula("min.u32 %r0, %r1, %r2;", "r", min, W, W),
    "max_s64": formula(
        "max.s64 %rd0, %rd1, %rd2;", "rd", lambda a, b: max(s(a, 64), s(b, 64)), Q, Q
    ),
    "max_u64": formula("max.u64 %rd0, %rd1, %rd2;", "rd", max, Q, Q),
    **{
        f"{op}_{kind}": formula(f"{op}.{kind} %r0, %r1, %r2;", "r", halves(function, signed), X, X)
        for kind, signed in (("u16x2", False), ("s16x2", True))
        for op, function in (("add", lambda a, b: a + b), ("min", min), ("max", max))
    },
    "abs_s32": formula("abs.s32 %r0, %r1;", "r", lambda a: abs(s(a)), W),
    "neg_s64": formula("neg.s64 %rd0, %rd1;", "rd", lambda a: -a, Q),
    "sad_s32": formula(
        "sad.s32 %r0, %r1, %r2, %r3;", "r", lambda a, b, c: c + abs(s(a) - s(b)), W, W, W
    ),
    "sad_u32": formula("sad.u32 %r0, %r1, %r2, 3;", "r", lambda a, b: 3 + abs(a - b), W, W),
    "dp4a_mixed": formula(
        "dp4a.s32.u32 %r0, %r1, %r2, %r3;",
        "r",
        lambda a, b, c: c + sum(x * y for x, y in zip(bytes_of(a, True), bytes_of(b, False))),
        W,
        W,
        W,
    ),
}
