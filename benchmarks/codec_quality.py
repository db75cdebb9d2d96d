"""How much each codec loses, with and without feedback.

    error      ||x - decode(encode(x))||^2 / ||x||^2
    feedback   the same error for the sum of 200 gradients g_t = mu + N(0, 1), mu = 0.2 * t3 (fixed)

Usage: python benchmarks/codec_quality.py [--json F]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

import measuring
import zcomm
from gradients import DISTRIBUTIONS, NUMEL, SEED, draw, student_t3
from zcomm.codecs import SPECS

STEPS = 200
STEP_NUMEL = 1 << 16


def normalized_error(x: torch.Tensor, approximation: torch.Tensor) -> float:
    x = x.double()
    return ((x - approximation).square().sum() / x.square().sum()).item()


def codec_error(codec: str, x: torch.Tensor) -> float:
    c = zcomm.codec(codec)
    return normalized_error(x, c.decode(c.encode(x), x.numel()))


def accumulated_error(
    codec: str, *, feedback: bool, steps: int = STEPS, n: int = STEP_NUMEL
) -> float:
    """The error of the sum of `steps` decoded gradients against the sum of the gradients."""
    generator = torch.Generator().manual_seed(SEED)
    c = zcomm.codec(codec)
    mu = 0.2 * student_t3(generator, n)
    residual = torch.zeros(n) if feedback else None
    sent = torch.zeros(n, dtype=torch.float64)
    true = torch.zeros(n, dtype=torch.float64)
    for _ in range(steps):
        gradient = mu + torch.randn(n, generator=generator)
        sent += c.decode(c.encode(gradient, residual), n)
        true += gradient
    return normalized_error(true, sent)


def bits_per_element(codec: str) -> float:
    """Includes scales and padding; at this size the frame's 32 bytes vanish."""
    return 8 * zcomm.codec(codec).wire_nbytes(NUMEL) / NUMEL


@dataclass(frozen=True)
class Row:
    codec: str
    bits: float
    errors: dict[str, float]  # by distribution
    sum_error: float  # of the sum of STEPS gradients, without feedback
    sum_error_with_feedback: float


def row_of(codec: str, data: dict[str, torch.Tensor]) -> Row:
    return Row(
        codec=codec,
        bits=bits_per_element(codec),
        errors={name: codec_error(codec, x) for name, x in data.items()},
        sum_error=accumulated_error(codec, feedback=False),
        sum_error_with_feedback=accumulated_error(codec, feedback=True),
    )


def cells(row: Row) -> list[str]:
    errors = [f"{error:.2g}" for error in row.errors.values()]
    sums = [f"{row.sum_error:.1e}", f"{row.sum_error_with_feedback:.1e}"]
    return [f"`{row.codec}`", f"{row.bits:.3f}", *errors, *sums]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    about = measuring.about(numel=NUMEL, seed=SEED, steps=STEPS, step_numel=STEP_NUMEL)
    measuring.print_about(about)
    data = {name: draw(name) for name in DISTRIBUTIONS}
    rows = [row_of(codec, data) for codec in SPECS]
    head = ["codec", "bits per element", *data, f"sum of {STEPS}", "with feedback"]
    measuring.print_table(head, [cells(row) for row in rows])
    measuring.write_json(args.json, about, rows)


if __name__ == "__main__":
    main()
