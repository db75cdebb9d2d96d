"""Computes the constant tables of the wire format and writes them for C++ and Python.

The Lloyd-Max quantizer is the fixed point of "a level is the mean of its cell; a cell ends halfway
between two levels" for the unit Gaussian, found by iteration in double precision. The ends of its
cells are then rounded to multiples of 1/48, so a signed byte can be compared with them. The means
of the resulting cells are rounded to bfloat16 (8 significant bits), which makes level x scale an
exact product. The signs are bits of splitmix64.

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
STEPS = 48  # thresholds are multiples of rms / STEPS; the largest still fits a signed byte


def _density(x: float) -> float:
    return math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _mass(lo: float, hi: float) -> float:
    return 0.5 * (math.erfc(lo / math.sqrt(2.0)) - math.erfc(hi / math.sqrt(2.0)))


def _cell_means(ends: list[float]) -> list[float]:
    """The mean of N(0, 1) between 0 and the first end, ..., the last end and infinity."""
    edges = [0.0, *ends, math.inf]
    tails = [_density(e) if e < math.inf else 0.0 for e in edges]
    return [(tails[i] - tails[i + 1]) / _mass(edges[i], edges[i + 1]) for i in range(len(ends) + 1)]


def lloyd_max_ends(levels: int) -> list[float]:
    """The cell ends in the positive half of the optimal `levels`-point quantizer."""
    half = levels // 2
    q = [3.0 * (i + 0.5) / half for i in range(half)]
    for _ in range(20000):
        new = _cell_means([(a + b) / 2 for a, b in zip(q, q[1:])])
        done = max(abs(a - b) for a, b in zip(q, new)) < 1e-15
        q = new
        if done:
            break
    return [(a + b) / 2 for a, b in zip(q, q[1:])]


def threshold_table(bits: int) -> list[int]:
    """The positive thresholds, in units of rms / STEPS."""
    return [round(STEPS * end) for end in lloyd_max_ends(1 << bits)]


def bf16_bits(x: float) -> int:
    u = struct.unpack("<I", struct.pack("<f", x))[0]
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16) & 0xFFFF


def bf16(x: float) -> float:
    return struct.unpack("<f", struct.pack("<I", bf16_bits(x) << 16))[0]


def level_table(bits: int) -> list[float]:
    """All 2**bits levels, increasing, each a bfloat16."""
    half = [bf16(q) for q in _cell_means([t / STEPS for t in threshold_table(bits)])]
    return [-q for q in reversed(half)] + half


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
        "// Made by tools/make_tables.py; do not edit.\n#pragma once\n\n",
        '#include "codec/float.h"\n\n',
        "namespace zcomm {\n\n",
        "// Bit i % 64 of word i / 64 set: element i of a block changes its sign.\n",
        f"ZC_TABLE std::uint64_t kSignWords[{MAX_BLOCK // 64}] = {{\n",
        _rows([f"0x{w:016x}ull" for w in sign_words()], 3, "    "),
        "};\n",
    ]
    out.append("\n// Thresholds are multiples of rms / kLmSteps.\n")
    out.append(f"inline constexpr float kLmSteps = {STEPS};\n")
    for bits in (4, 3, 2):
        levels, thresholds = level_table(bits), threshold_table(bits)
        out.append(f"\nZC_TABLE float kLm{bits}Levels[{len(levels)}] = {{\n")
        out.append(_rows([f"{v!r}f" for v in levels], 6, "    ") + "};\n")
        out.append(f"ZC_TABLE signed char kLm{bits}Thresholds[{len(thresholds)}] = {{\n")
        out.append(_rows([str(t) for t in thresholds], 12, "    ") + "};\n")
    out.append("\n}  // namespace zcomm\n")
    return "".join(out)


def python_text() -> str:
    out = [
        '"""Made by tools/make_tables.py; do not edit."""\n\n',
        "# Bit i % 64 of word i // 64 set: element i of a block changes its sign.\n",
        "SIGN_WORDS: tuple[int, ...] = (\n",
        _rows([f"0x{w:016X}" for w in sign_words()], 3, "    "),
        f")\n\n# Thresholds are multiples of rms / STEPS.\nSTEPS = {STEPS}\n\n",
        "THRESHOLDS: dict[int, tuple[int, ...]] = {\n",
    ]
    for bits in (4, 3, 2):
        row = ", ".join(str(t) for t in threshold_table(bits))
        out.append(f"    {bits}: ({row},),\n")
    out.append("}\n\nLEVELS: dict[int, tuple[float, ...]] = {\n")
    for bits in (4, 3, 2):
        rows = _rows([repr(v) for v in level_table(bits)], 6, "        ")
        out.append(f"    {bits}: (\n{rows}    ),\n")
    out.append("}\n")
    return "".join(out)


FILES = {"csrc/codec/lm_tables.h": cpp_text, "zcomm/wire/lm_tables.py": python_text}


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
