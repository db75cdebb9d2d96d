"""Instructions on floats to try; see ptx_snippets.py."""

from __future__ import annotations

import math
import struct

from ptx_snippets import Snippet, d, f, formula, s, table

NAN, QUIET, SIGNALING = 0x7FFFFFFF, 0xFFC00123, 0x7F800001
INF, MINUS = f(math.inf), 0x80000000
FLOATS = (0, MINUS, 1, f(1.0), f(-1.5), f(0.1), 0x7F7FFFFF, INF, f(-math.inf), QUIET, SIGNALING)
NUMBERS = FLOATS[:-2]


def x(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def is_nan(bits: int) -> bool:
    return bits & 0x7FFFFFFF > INF


def rounded(value: float) -> int:
    """An fp64 as an fp32; of sums, products and quotients of fp32 this is the exact result's."""
    if value != value:
        return NAN
    try:
        return f(value)
    except OverflowError:
        return f(math.copysign(math.inf, value))


def add(a: int, b: int) -> int:
    return rounded(x(a) + x(b))


def divide(a: int, b: int) -> int:
    if x(b) != 0:
        return rounded(x(a) / x(b))
    sign = (a ^ b) & MINUS
    return NAN if is_nan(a) or is_nan(b) or x(a) == 0 else INF | sign


def least(a: int, b: int) -> int:
    if is_nan(a) or is_nan(b):
        return NAN if is_nan(a) and is_nan(b) else b if is_nan(a) else a
    return min(a, b, key=lambda v: (x(v), v != MINUS))


def most(a: int, b: int) -> int:
    if is_nan(a) or is_nan(b):
        return NAN if is_nan(a) and is_nan(b) else b if is_nan(a) else a
    return max(a, b, key=lambda v: (x(v), v != MINUS))


def pair(low: int, high: int) -> int:
    return high << 32 | low


ARITHMETIC = {
    "add_rn": formula("add.rn.f32 %r0, %r1, %r2;", "r", add, FLOATS, FLOATS),
    "sub_rn": formula(
        "sub.rn.f32 %r0, %r1, %r2;", "r", lambda a, b: rounded(x(a) - x(b)), FLOATS, FLOATS
    ),
    "mul_rn": formula(
        "mul.rn.f32 %r0, %r1, %r2;", "r", lambda a, b: rounded(x(a) * x(b)), FLOATS, FLOATS
    ),
    "div_rn": formula("div.rn.f32 %r0, %r1, %r2;", "r", divide, FLOATS, FLOATS),
    "rcp_rn": formula("rcp.rn.f32 %r0, %r1;", "r", lambda a: divide(f(1.0), a), FLOATS),
    "sqrt_rn": formula(
        "sqrt.rn.f32 %r0, %r1;",
        "r",
        lambda a: a if a == MINUS else rounded(math.sqrt(x(a))) if x(a) >= 0 else NAN,
        FLOATS,
    ),
    # 1 + 2^-24 in one rounding, where a product rounded first would lose the last bit.
    "fma_rn": table(
        "fma.rn.f32 %r0, %r1, %r2, %r3;",
        "r",
        ((0x3F800001, 0x3F800001, f(-1.0)), f(2**-22 + 2**-46)),
        ((0x3F800001, 0x3F7FFFFE, f(-1.0)), f(-(2**-46))),
        ((INF, 0, f(1.0)), NAN),
        ((f(2.0), f(3.0), QUIET), NAN),
    ),
    "fma_f64": table(
        "fma.rn.f64 %rd0, %rd1, %rd2, %rd3;",
        "rd",
        ((d(1 + 2**-52), d(1 - 2**-52), d(-1.0)), d(-(2.0**-104))),
    ),
    "add_f64": formula(
        "add.rn.f64 %rd0, %rd1, %rd2;", "rd", lambda a, b: a + b and d(3.75), (d(1.5),), (d(2.25),)
    ),
    "add_f32x2": table(
        "add.rn.f32x2 %rd0, %rd1, %rd2;",
        "rd",
        ((pair(f(1.0), f(2.0)), pair(f(0.5), f(-4.0))), pair(f(1.5), f(-2.0))),
        ((pair(INF, SIGNALING), pair(f(-math.inf), 0)), pair(NAN, NAN)),
    ),
    "mul_f32x2": table(
        "mul.rn.f32x2 %rd0, %rd1, %rd2;",
        "rd",
        ((pair(f(3.0), f(2.0)), pair(f(0.5), f(-4.0))), pair(f(1.5), f(-8.0))),
    ),
    "fma_f32x2": table(
        "fma.rn.f32x2 %rd0, %rd1, %rd2, %rd3;",
        "rd",
        (
            (pair(0x3F800001, f(2.0)), pair(0x3F800001, f(3.0)), pair(f(-1.0), f(1.0))),
            pair(f(2**-22 + 2**-46), f(7.0)),
        ),
    ),
    "min_f32": formula("min.f32 %r0, %r1, %r2;", "r", least, FLOATS, FLOATS),
    "max_f32": formula("max.f32 %r0, %r1, %r2;", "r", most, FLOATS, FLOATS),
    "max_three": formula(
        "max.f32 %r0, %r1, %r2, %r3;",
        "r",
        lambda a, b, c: most(most(a, b), c),
        *(FLOATS[1::2],) * 3,
    ),
    "min_nan": formula(
        "min.NaN.f32 %r0, %r1, %r2;",
        "r",
        lambda a, b: NAN if is_nan(a) or is_nan(b) else least(a, b),
        FLOATS,
        FLOATS,
    ),
    "abs_neg": formula(
        "abs.f32 %r4, %r1; neg.f32 %r0, %r4;", "r", lambda a: a & ~MINUS | MINUS, FLOATS
    ),
    "copysign": formula(
        "copysign.f32 %r0, %r1, %r2;", "r", lambda a, b: a & MINUS | b & ~MINUS, FLOATS, FLOATS
    ),
    "slct": table(
        "slct.u32.f32 %r0, 1, 2, %r1;",
        "r",
        *((v, 1 if not is_nan(v) and x(v) >= 0 else 2) for v in FLOATS),
    ),
}

COMPARED = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a < b or a > b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
COMPARISONS: dict[str, Snippet] = {}
for name, holds in COMPARED.items():
    COMPARISONS[f"setp_{name}_f32"] = formula(
        f"setp.{name}.f32 %p0, %r1, %r2;", "p", lambda a, b, h=holds: h(x(a), x(b)), FLOATS, FLOATS
    )
    COMPARISONS[f"setp_{name}u_f32"] = formula(
        f"setp.{name}u.f32 %p0, %r1, %r2;",
        "p",
        lambda a, b, h=holds: is_nan(a) or is_nan(b) or h(x(a), x(b)),
        FLOATS,
        FLOATS,
    )
    COMPARISONS[f"setp_{name}_s32"] = formula(
        f"setp.{name}.s32 %p0, %r1, %r2;", "p", lambda a, b, h=holds: h(s(a), s(b)), FLOATS, FLOATS
    )
    COMPARISONS[f"set_{name}_u32"] = formula(
        f"set.{name}.u32.u32 %r0, %r1, %r2;", "r", lambda a, b, h=holds: -h(a, b), FLOATS, FLOATS
    )
for name, same in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
    COMPARISONS[f"setp_{name}_u32"] = formula(
        f"setp.{name}.u32 %p0, %r1, %r2;", "p", COMPARED[same], FLOATS, FLOATS
    )
COMPARISONS |= {
    "setp_num": formula(
        "setp.num.f32 %p0, %r1, %r2;",
        "p",
        lambda a, b: not (is_nan(a) or is_nan(b)),
        FLOATS,
        FLOATS,
    ),
    "setp_nan": formula(
        "setp.nan.f32 %p0, %r1, %r2;", "p", lambda a, b: is_nan(a) or is_nan(b), FLOATS, FLOATS
    ),
    "setp_both": formula(
        "setp.lt.u32 %p1, %r3, 5; setp.lt.and.s32 %p2|%p3, %r1, %r2, %p1;"
        "selp.u32 %r4, 1, 0, %p2; selp.u32 %r5, 2, 0, %p3; add.u32 %r0, %r4, %r5;",
        "r",
        lambda a, b, c: (1 if s(a) < s(b) else 2) if c < 5 else 0,
        (1, 2, MINUS),
        (1, 2, MINUS),
        (4, 5),
    ),
    "setp_negated": formula(
        "setp.lt.u32 %p1, %r3, 5; setp.lt.or.s32 %p0, %r1, %r2, !%p1;",
        "p",
        lambda a, b, c: s(a) < s(b) or c >= 5,
        (1, 2),
        (1, 2),
        (4, 5),
    ),
    "testp": table(
        "testp.finite.f32 %p1, %r1; testp.infinite.f32 %p2, %r1; testp.number.f32 %p3, %r1;"
        "testp.notanumber.f32 %p4, %r1; testp.normal.f32 %p5, %r1; testp.subnormal.f32 %p6, %r1;"
        "mov.u32 %r0, 0; @%p1 or.b32 %r0, %r0, 1; @%p2 or.b32 %r0, %r0, 2; @%p3 or.b32 %r0, %r0, 4;"
        "@%p4 or.b32 %r0, %r0, 8; @%p5 or.b32 %r0, %r0, 16; @%p6 or.b32 %r0, %r0, 32;",
        "r",
        (f(1.5), 1 + 4 + 16),
        (MINUS, 1 + 4 + 16),
        (1, 1 + 4 + 32),
        (INF, 2 + 4),
        (QUIET, 8),
    ),
}
