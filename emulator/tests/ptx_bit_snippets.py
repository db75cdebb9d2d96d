"""Shifts and bits to try; see ptx_snippets.py."""

from __future__ import annotations

from collections.abc import Sequence

from ptx_snippets import H, Q, W, formula, s

SHIFTS = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 0x80000000, 0xFFFFFFFF)
FIELD = (0, 1, 5, 31, 32, 33, 63, 64, 255, 256, 257)


def bit_field(a: int, begin: int, length: int, width: int, signed: bool) -> int:
    """bfe as the PTX ISA writes it down, bit by bit."""
    begin, length = begin & 255, length & 255
    sign = a >> min(begin + length - 1, width - 1) & 1 if signed and length else 0
    result = 0
    for i in range(width):
        inside = i < length and begin + i < width
        result |= (a >> (begin + i) & 1 if inside else sign) << i
    return result


def insert(a: int, b: int, begin: int, length: int, width: int) -> int:
    begin, length = begin & 255, length & 255
    for i in range(length):
        if begin + i < width:
            b = b & ~(1 << (begin + i)) | (a >> i & 1) << (begin + i)
    return b


def permuted(a: int, b: int, picks: Sequence[int], signs: Sequence[bool] = (False,) * 4) -> int:
    octets = (b << 32 | a).to_bytes(8, "little")
    chosen = [0xFF * (octets[p] >> 7) if is_sign else octets[p] for p, is_sign in zip(picks, signs)]
    return int.from_bytes(bytes(chosen), "little")


def logic(a: int, b: int, c: int, lut: int) -> int:
    """lop3: 0xF0, 0xCC and 0xAA stand for a, b and c."""
    index = [(a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1) for i in range(32)]
    return sum((lut >> n & 1) << i for i, n in enumerate(index))


def shifted(a: int, n: int, width: int, signed: bool) -> int:
    return (s(a, width) if signed else a) >> min(n, width)


SHIFTED = {
    f"shl_b{n}": formula(
        f"shl.b{n} %{r}0, %{r}1, %r2;", r, lambda a, k: a << min(k, 64), values, SHIFTS
    )
    for n, r, values in ((16, "rs", H), (32, "r", W), (64, "rd", Q))
} | {
    f"shr_{t}{n}": formula(
        f"shr.{t}{n} %{r}0, %{r}1, %r2;",
        r,
        lambda a, k, n=n, t=t: shifted(a, k, n, t == "s"),
        values,
        SHIFTS,
    )
    for n, r, values in ((16, "rs", H), (32, "r", W), (64, "rd", Q))
    for t in "usb"
    if t != "b" or n == 32
}


def funnel(low: int, high: int, amount: int, left: bool) -> int:
    both = high << 32 | low
    return both << amount >> 32 if left else both >> amount


SHIFTED |= {
    f"shf_{side}_{mode}": formula(
        f"shf.{side}.{mode}.b32 %r0, %r1, %r2, %r3;",
        "r",
        lambda a, b, k, side=side, mode=mode: funnel(
            a, b, min(k, 32) if mode == "clamp" else k & 31, side == "l"
        ),
        W[:7],
        W,
        SHIFTS,
    )
    for side in "lr"
    for mode in ("clamp", "wrap")
}

SELECTORS = (0x3210, 0x7654, 0x0123, 0x4180, 0xFEDC, 0xBA98, 0x11115140)
PICKS = {
    "f4e": lambda c, i: c + i,
    "b4e": lambda c, i: (c - i) % 8,
    "rc8": lambda c, i: c,
    "ecl": max,
    "ecr": min,
    "rc16": lambda c, i: 2 * (c % 2) + i % 2,
}
BITS = {
    "prmt": formula(
        "prmt.b32 %r0, %r1, %r2, %r3;",
        "r",
        lambda a, b, c: permuted(
            a, b, [c >> 4 * i & 7 for i in range(4)], [bool(c >> 4 * i & 8) for i in range(4)]
        ),
        (0x83828180, 0x00FF7F80),
        (0x87060504, 0xDEADBEEF),
        SELECTORS,
    ),
    **{
        f"prmt_{mode}": formula(
            f"prmt.b32.{mode} %r0, %r1, %r2, %r3;",
            "r",
            lambda a, b, c, pick=pick: permuted(a, b, [pick(c & 3, i) for i in range(4)]),
            (0x83828180,),
            (0x87868584,),
            (0, 1, 2, 3, 4),
        )
        for mode, pick in PICKS.items()
    },
    **{
        f"lop3_{lut}": formula(
            f"lop3.b32 %r0, %r1, %r2, %r3, {lut};",
            "r",
            lambda a, b, c, lut=lut: logic(a, b, c, lut),
            W[5:],
            W[5:],
            (0x0F0F3355, 0xFFFFFFFF),
        )
        for lut in (0x00, 0x01, 0x80, 0x96, 0xE8, 0xCA, 0xEA, 0xFF)
    },
    "bfe_u32": formula(
        "bfe.u32 %r0, %r1, %r2, %r3;", "r", lambda *x: bit_field(*x, 32, False), W[6:], FIELD, FIELD
    ),
    "bfe_s32": formula(
        "bfe.s32 %r0, %r1, %r2, %r3;", "r", lambda *x: bit_field(*x, 32, True), W[6:], FIELD, FIELD
    ),
    "bfe_s64": formula(
        "bfe.s64 %rd0, %rd1, %r2, %r3;",
        "rd",
        lambda *x: bit_field(*x, 64, True),
        Q[4:],
        FIELD,
        FIELD,
    ),
    "bfi_b32": formula(
        "bfi.b32 %r0, %r1, 0x5A5A5A5A, %r2, %r3;",
        "r",
        lambda a, *x: insert(a, 0x5A5A5A5A, *x, 32),
        W[5:],
        FIELD,
        FIELD,
    ),
    "bfi_b64": formula(
        "bfi.b64 %rd0, %rd1, 0x5A5A5A5A, %r2, %r3;",
        "rd",
        lambda a, *x: insert(a, 0x5A5A5A5A, *x, 64),
        Q[4:],
        FIELD,
        FIELD,
    ),
    "bfind_u32": formula("bfind.u32 %r0, %r1;", "r", lambda a: a.bit_length() - 1, W),
    "bfind_s32": formula(
        "bfind.s32 %r0, %r1;", "r", lambda a: (a if s(a) >= 0 else ~s(a)).bit_length() - 1, W
    ),
    "bfind_u64": formula("bfind.u64 %r0, %rd1;", "r", lambda a: a.bit_length() - 1, Q),
    "bfind_shiftamt": formula(
        "bfind.shiftamt.u32 %r0, %r1;", "r", lambda a: 32 - a.bit_length() if a else -1, W
    ),
    "ffs": formula(
        "brev.b32 %r4, %r1; bfind.shiftamt.u32 %r5, %r4; add.s32 %r0, %r5, 1;",
        "r",
        lambda a: (a & -a).bit_length(),
        W,
    ),
    "clz_b32": formula("clz.b32 %r0, %r1;", "r", lambda a: 32 - a.bit_length(), W),
    "clz_b64": formula("clz.b64 %r0, %rd1;", "r", lambda a: 64 - a.bit_length(), Q),
    "popc_b64": formula("popc.b64 %r0, %rd1;", "r", lambda a: a.bit_count(), Q),
    "brev_b64": formula("brev.b64 %rd0, %rd1;", "rd", lambda a: int(f"{a:064b}"[::-1], 2), Q),
    "not_xor_and_or": formula(
        "not.b32 %r4, %r1; xor.b32 %r5, %r4, %r2; and.b32 %r6, %r5, 0xFF00; or.b32 %r0, %r6, %r3;",
        "r",
        lambda a, b, c: (~a ^ b) & 0xFF00 | c,
        W,
        W,
        W,
    ),
    "cnot": formula("cnot.b32 %r0, %r1;", "r", lambda a: a == 0, W),
}
