"""Computes the constant tables of the formats and writes them for C++ and Python.

The Lloyd-Max levels are the fixed point of "a level is the mean of its cell, a
cell ends half way between two levels" for the unit Gaussian, found by iteration
in double precision, then rounded to bfloat16 (8 significant bits), so that
level x scale is an exact product. The signs are the bits of splitmix64.

Usage: python tools/make_tables.py [--check]
"""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIGN_SEED = 0x7A636F6D6D
MAX_BLOCK = 1024
MASK64 = (1 << 64) - 1


def _density(x: float) -> float:
    return math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _mass(lo: float, hi: float) -> float:
    return 0.5 * (math.erfc(lo / math.sqrt(2.0)) - math.erfc(hi / math.sqrt(2.0)))


def lloyd_max(levels: int) -> list[float]:
    """The positive half of the optimal `levels`-point quantiser of N(0, 1)."""
    half = levels // 2
    q = [3.0 * (i + 0.5) / half for i in range(half)]
    for _ in range(20000):
        edges = [0.0] + [(a + b) / 2 for a, b in zip(q, q[1:])] + [math.inf]
        ends = list(zip(edges, edges[1:]))
        new = [(_density(a) - (0.0 if b == math.inf else _density(b))) / _mass(a, b) for a, b in ends]
        done = max(abs(a - b) for a, b in zip(q, new)) < 1e-15
        q = new
        if done:
            break
    return q


def bf16_bits(x: float) -> int:
    u = struct.unpack("<I", struct.pack("<f", x))[0]
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16) & 0xFFFF


def bf16(x: float) -> float:
    return struct.unpack("<f", struct.pack("<I", bf16_bits(x) << 16))[0]


def level_table(bits: int) -> list[float]:
    """All 2**bits levels, increasing, each a bfloat16."""
    half = [bf16(q) for q in lloyd_max(1 << bits)]
    return [-q for q in reversed(half)] + half


def midpoint_table(levels: list[float]) -> list[float]:
    """Half way between neighbouring levels: exact in fp32 (at most 12 bits)."""
    return [(a + b) / 2 for a, b in zip(levels, levels[1:])]


def sign_words() -> list[int]:
    state, words = SIGN_SEED, []
    for _ in range(MAX_BLOCK // 64):
        state = (state + 0x9E3779B97F4A7C15) & MASK64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        words.append(z ^ (z >> 31))
    return words


def _rows(items: list[str], per_row: int, indent: str) -> str:
    rows = [", ".join(items[i : i + per_row]) for i in range(0, len(items), per_row)]
    return "".join(f"{indent}{row},\n" for row in rows)


def cpp_text() -> str:
    out = [
        "// Made by tools/make_tables.py; do not edit.\n#pragma once\n\n#include <cstdint>\n\n",
        "namespace zcomm {\n\n",
        "// Bit i % 64 of word i / 64 set: element i of a block changes its sign.\n",
        f"inline constexpr std::uint64_t kSignWords[{MAX_BLOCK // 64}] = {{\n",
        _rows([f"0x{w:016x}ull" for w in sign_words()], 3, "    "),
        "};\n",
    ]
    for bits in (4, 3, 2):
        levels = level_table(bits)
        for name, values in (("Levels", levels), ("Midpoints", midpoint_table(levels))):
            out.append(f"\ninline constexpr float kLm{bits}{name}[{len(values)}] = {{\n")
            out.append(_rows([f"{v!r}f" for v in values], 6, "    ") + "};\n")
    out.append("\n}  // namespace zcomm\n")
    return "".join(out)


def python_text() -> str:
    out = [
        '"""Made by tools/make_tables.py; do not edit."""\n\n',
        "# Bit i % 64 of word i // 64 set: element i of a block changes its sign.\n",
        "SIGN_WORDS: tuple[int, ...] = (\n",
        _rows([f"0x{w:016X}" for w in sign_words()], 3, "    "),
        ")\n\nLEVELS: dict[int, tuple[float, ...]] = {\n",
    ]
    for bits in (4, 3, 2):
        out.append(f"    {bits}: (\n{_rows([repr(v) for v in level_table(bits)], 6, '        ')}    ),\n")
    out.append("}\n")
    return "".join(out)


FILES = {"csrc/codec/lm_tables.h": cpp_text, "zcomm/codecs/lm_tables.py": python_text}


def main() -> int:
    stale = []
    for name, make in FILES.items():
        path, text = ROOT / name, make()
        if "--check" in sys.argv:
            stale += [] if path.exists() and path.read_text() == text else [name]
        else:
            path.write_text(text)
    if stale:
        print("stale, run tools/make_tables.py:", *stale)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
