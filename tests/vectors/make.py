"""Writes vectors.json: small inputs and what the reference makes of them.

    python tests/vectors/make.py            overwrites the file
    python tests/vectors/make.py --check    compares it

fp32 values are patterns in hex; wires are their bytes in hex. The input and the residual of a size
are the same for all codecs. `prescale` is an fp32 pattern too.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import torch
from torch import Tensor

from zcomm import codec

PATH = Path(__file__).parent / "vectors.json"
SIZES = (5, 131)
PRESCALE = 0x3EAAAAAB  # the fp32 number nearest to 1/3
SPECS = ["none", "bf16", "fp16", "int8", "fp8", "int4", "lm4", "lm3", "lm2", "sign"]
SPECS += ["topk:0.01", "topk:0.3", "int4:block=32", "lm3:block=64"]


def values(words: str) -> Tensor:
    """The fp32 values of patterns in hex."""
    patterns = [int(word, 16) for word in words.split()]
    return torch.frombuffer(
        bytearray(struct.pack(f"<{len(patterns)}I", *patterns)), dtype=torch.float32
    )


def words(t: Tensor) -> str:
    return " ".join(f"{u & 0xFFFFFFFF:08x}" for u in t.view(torch.int32).tolist())


def numbers(n: int, state: int) -> str:
    """n patterns between 2^-8 and 2^4 from a linear congruential generator, and special ones."""
    patterns = []
    for _ in range(n):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        sign, exponent, mantissa = state >> 63, 119 + (state >> 40) % 12, (state >> 20) % 2**23
        patterns.append(sign << 31 | exponent << 23 | mantissa)
    if n > 64:
        patterns[3:7] = [0, 0x80000000, 0x00000001, 0x00800000]
    return " ".join(f"{u:08x}" for u in patterns)


def prescale() -> float:
    return float(struct.unpack("<f", struct.pack("<I", PRESCALE))[0])


def vector(spec: str, given: dict[str, str]) -> dict[str, object]:
    c, residual = codec(spec), values(given["residual"])
    n = residual.numel()
    wire = c.encode(values(given["input"]), residual, prescale=prescale(), kernels="reference")
    decoded = c.decode(wire, n, kernels="reference")
    return {
        "codec": spec,
        "n": n,
        "wire": bytes(wire.tolist()).hex(),
        "residual": words(residual),
        "decoded": words(decoded),
    }


def text() -> str:
    # The residuals are a hundredth of the inputs' size, nearly: six exponents lower.
    inputs = {str(n): {"input": numbers(n, n), "residual": numbers(n, n + 1)} for n in SIZES}
    for given in inputs.values():
        given["residual"] = words(values(given["residual"]) * 2.0**-6)
    vectors = [vector(spec, inputs[str(n)]) for spec in SPECS for n in SIZES]
    whole = {"prescale": f"{PRESCALE:08x}", "inputs": inputs, "vectors": vectors}
    return json.dumps(whole, indent=1) + "\n"


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        PATH.write_text(text())
    elif PATH.read_text() != text():
        sys.exit(f"{PATH}: expected what the reference makes, got another; run {__file__}")
