"""What each codec loses, as the markdown tables of the README.

    error      ||x - decode(encode(x))||^2 / ||x||^2
    feedback   the same error of the sum of 200 gradients g_t = mu + N(0, 1), mu = 0.2 * t3 once

Usage: python benchmarks/codec_quality.py
"""

from __future__ import annotations

import torch

import zcomm
from gradients import DISTRIBUTIONS, NUMEL, SEED, draw, student_t3
from zcomm.codecs import SPECS

STEPS = 200
STEP_NUMEL = 1 << 16


def normalised_error(x: torch.Tensor, approximation: torch.Tensor) -> float:
    x = x.double()
    return ((x - approximation).square().sum() / x.square().sum()).item()


def codec_error(codec: str, x: torch.Tensor) -> float:
    c = zcomm.codec(codec)
    return normalised_error(x, c.decode(c.encode(x), x.numel()))


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
    return normalised_error(true, sent)


def bits_per_element(codec: str) -> float:
    """Scales and padding included; the frame's 32 bytes vanish at this size."""
    return 8 * zcomm.codec(codec).wire_nbytes(NUMEL) / NUMEL


def print_table(head: list[str], rows: list[list[str]]) -> None:
    for row in [head, ["---"] * len(head), *rows]:
        print("| " + " | ".join(row) + " |")


def main() -> None:
    data = {name: draw(name) for name in DISTRIBUTIONS}
    print(f"Normalised squared error, {NUMEL} elements, seed {SEED}\n")
    print_table(
        ["codec", "bits per element", *data],
        [
            [
                f"`{c}`",
                f"{bits_per_element(c):.3f}",
                *(f"{codec_error(c, x):.2g}" for x in data.values()),
            ]
            for c in SPECS
        ],
    )
    print(f"\nThe sum of {STEPS} gradients\n")
    print_table(
        ["codec", "without feedback", "with feedback"],
        [
            [f"`{c}`", *(f"{accumulated_error(c, feedback=f):.1e}" for f in (False, True))]
            for c in SPECS
        ],
    )


if __name__ == "__main__":
    main()
