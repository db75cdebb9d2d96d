"""Conversions to try; see ptx_snippets.py."""

from __future__ import annotations

import math
from fractions import Fraction

from ptx_float_snippets import FLOATS, INF, NAN, NUMBERS, is_nan, x
from ptx_snippets import d, f, formula, s, table

ROUNDING = {
    "rn": lambda v: round(v),
    "rz": lambda v: math.trunc(v),
    "rm": lambda v: math.floor(v),
    "rp": lambda v: math.ceil(v),
}
HALVES = tuple(f(v) for v in (0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.3, -0.3, 0.99, 255.5, 256.5, -1.0))
BIG = tuple(
    f(v) for v in (2.0**31, -(2.0**31), 2.0**31 - 128, 2.0**32, 2.0**63, -(2.0**63), 2.0**64)
)
LIMITS = {"u8": (0, 255), "s8": (-128, 127), "u16": (0, 65535), "s16": (-32768, 32767)}
LIMITS |= {"u32": (0, 2**32 - 1), "s32": (-(2**31), 2**31 - 1)}
LIMITS |= {"u64": (0, 2**64 - 1), "s64": (-(2**63), 2**63 - 1)}


def to_int(a: int, kind: str, mode: str) -> int:
    low, high = LIMITS[kind]
    if is_nan(a):
        return 1 << 63 if kind[1:] == "64" else 0
    if math.isinf(x(a)):
        return high if x(a) > 0 else low
    return max(low, min(high, ROUNDING[mode](x(a))))


def directed(exact: Fraction, mode: str) -> int:
    """An exact value as an fp32: the largest one below, or the smallest one above."""
    if exact == 0:
        return 0
    size, sign = abs(exact), exact < 0
    exponent = max(math.floor(math.log2(size)), -126)
    exponent += (size >= Fraction(2) ** (exponent + 1)) - (size < Fraction(2) ** exponent)
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    down = {"rz": True, "rm": not sign, "rp": sign, "rn": None}[mode]
    count = size / unit
    kept = round(count) if down is None else math.floor(count) if down else math.ceil(count)
    value = kept * unit
    if value >= Fraction(2) ** 128:
        return 0x7F7FFFFF | sign << 31 if down else INF | sign << 31
    return f(float(-value if sign else value))


CONVERSIONS = {
    f"cvt_{mode}i_{kind}_f32": formula(
        f"cvt.{mode}i.{kind}.f32 %{r}0, %r1;",
        r,
        lambda a, kind=kind, mode=mode: to_int(a, kind, mode),
        FLOATS + HALVES + BIG,
    )
    for mode in ROUNDING
    for kind, r in (
        ("u8", "r"),
        ("s8", "r"),
        ("s16", "rs"),
        ("u32", "r"),
        ("s32", "r"),
        ("s64", "rd"),
        ("u64", "rd"),
    )
}
CONVERSIONS |= {
    f"cvt_{mode}i_f32_f32": formula(
        f"cvt.{mode}i.f32.f32 %r0, %r1;",
        "r",
        lambda a, mode=mode: (
            NAN
            if is_nan(a)
            else a
            if math.isinf(x(a))
            else f(math.copysign(ROUNDING[mode](x(a)), x(a)))
        ),
        FLOATS + HALVES + BIG,
    )
    for mode in ROUNDING
}
WHOLE = (0, 1, 2**24 + 1, 2**24 + 3, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
DOUBLES = (0.0, 0.1, -0.1, 1 + 2**-24, 1 + 3 * 2**-24, 1e39, -1e39, 1e-46, 2**-149 * 1.5, 2**-126)
CONVERSIONS |= {
    f"cvt_{mode}_f32_{kind}": formula(
        f"cvt.{mode}.f32.{kind} %r0, %rd1;" if kind != "s32" else f"cvt.{mode}.f32.s32 %r0, %r1;",
        "r",
        lambda a, mode=mode, kind=kind: directed(
            Fraction(a if kind == "u64" else s(a, int(kind[1:]))), mode
        ),
        WHOLE,
    )
    for mode in ROUNDING
    for kind in ("u64", "s64", "s32")
}
CONVERSIONS |= {
    f"cvt_{mode}_f32_f64": table(
        f"cvt.{mode}.f32.f64 %r0, %rd1;",
        "r",
        *((d(v), directed(Fraction(v), mode)) for v in DOUBLES),
        (d(-math.inf), f(-math.inf)),
        (d(math.nan), NAN),
    )
    for mode in ROUNDING
}
CONVERSIONS |= {
    "cvt_f64_f32": formula("cvt.f64.f32 %rd0, %r1;", "rd", lambda a: d(x(a)), NUMBERS),
    "cvt_f64_s64": formula("cvt.rn.f64.s64 %rd0, %rd1;", "rd", lambda a: d(float(s(a, 64))), WHOLE),
    "cvt_s32_s8": formula("cvt.s32.s8 %r0, %r1;", "r", lambda a: s(a, 8), (127, 128, 255, 0x17F)),
    "cvt_u32_u8": formula("cvt.u32.u8 %r0, %r1;", "r", lambda a: a & 255, (127, 128, 255, 0x17F)),
    "cvt_s64_s32": formula("cvt.s64.s32 %rd0, %r1;", "rd", lambda a: s(a), WHOLE[:7]),
    "cvt_u64_u32": formula("cvt.u64.u32 %rd0, %r1;", "rd", lambda a: a, WHOLE[:7]),
    # The value is cut to 8 bits first; then its sign fills the register.
    "cvt_s8_u32": formula("cvt.s8.u32 %r0, %r1;", "r", lambda a: s(a, 8), (127, 128, 255, 256)),
    "cvt_sat_u8_s32": formula(
        "cvt.sat.u8.s32 %r0, %r1;", "r", lambda a: max(0, min(255, s(a))), (0, 5, 255, 256, 2**31)
    ),
    "cvt_sat_s8_u32": formula(
        "cvt.sat.s8.u32 %r0, %r1;", "r", lambda a: min(127, a), (0, 5, 127, 128, 2**31)
    ),
}
