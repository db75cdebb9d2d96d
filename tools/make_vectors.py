"""Writes zcomm/conformance/vectors/vectors.json: small inputs and the reference's results.

python tools/make_vectors.py            overwrites the file
python tools/make_vectors.py --check    compares it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from zcomm import codecs
from zcomm.conformance.vectors import made, values, words

PATH = Path(__file__).resolve().parent.parent / "zcomm" / "conformance" / "vectors" / "vectors.json"
SIZES = (5, 131)
PRESCALE = "3eaaaaab"  # the fp32 number nearest to 1/3
SPECS = (*codecs.SPECS, "topk:0.3", "int4:block=32", "lm3:block=64")


def numbers(n: int, state: int) -> str:
    """n patterns between 2^-8 and 2^4 from a linear congruential generator, plus special ones."""
    patterns = []
    for _ in range(n):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        sign, exponent, mantissa = state >> 63, 119 + (state >> 40) % 12, (state >> 20) % 2**23
        patterns.append(sign << 31 | exponent << 23 | mantissa)
    if n > 64:
        patterns[3:7] = [0, 0x80000000, 0x00000001, 0x00800000]
    return " ".join(f"{u:08x}" for u in patterns)


def text() -> str:
    # Residuals are about a hundredth of the inputs: six exponents lower.
    inputs = {str(n): {"input": numbers(n, n), "residual": numbers(n, n + 1)} for n in SIZES}
    for given in inputs.values():
        given["residual"] = words(values(given["residual"]) * 2.0**-6)
    vectors = [made(spec, inputs[str(n)], PRESCALE, "reference") for spec in SPECS for n in SIZES]
    whole = {"prescale": PRESCALE, "inputs": inputs, "vectors": vectors}
    return json.dumps(whole, indent=1) + "\n"


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        PATH.write_text(text())
    elif PATH.read_text() != text():
        sys.exit(f"{PATH}: expected what the reference makes, got another; run {__file__}")
