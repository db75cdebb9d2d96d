"""The test vectors of the wire format: small inputs, and what every implementation makes of them.

They are checked in and do not change. tools/make_vectors.py says how they were made. fp32 values
are patterns in hex, wires are their bytes in hex. The input and the residual of a size are the same
for all codecs. `prescale` is an fp32 pattern too.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zcomm.codecs import codec
from zcomm.report.finding import OK, PROBLEM, Finding
from zcomm.wire.header import WireError

PATH = Path(__file__).parent / "vectors.json"
CPU = torch.device("cpu")


def load() -> dict[str, Any]:
    """`inputs` by size, `prescale`, and the list of `vectors`."""
    whole: dict[str, Any] = json.loads(PATH.read_text(encoding="ascii"))
    return whole


def values(words: str) -> Tensor:
    """The fp32 values of patterns in hex."""
    patterns = [int(word, 16) for word in words.split()]
    return torch.frombuffer(
        bytearray(struct.pack(f"<{len(patterns)}I", *patterns)), dtype=torch.float32
    )


def words(t: Tensor) -> str:
    return " ".join(f"{u & 0xFFFFFFFF:08x}" for u in t.view(torch.int32).tolist())


def made(
    spec: str, given: dict[str, str], prescale: str, kernels: str, device: torch.device = CPU
) -> dict[str, Any]:
    """The vector that a kernel set makes of an input."""
    c, residual = codec(spec), values(given["residual"]).to(device)
    n, factor = residual.numel(), values(prescale).item()
    grad = values(given["input"]).to(device)
    wire = c.encode(grad, residual, prescale=factor, kernels=kernels)
    decoded = c.decode(wire, n, kernels=kernels)
    return {
        "codec": spec,
        "n": n,
        "wire": bytes(wire.tolist()).hex(),
        "residual": words(residual),
        "decoded": words(decoded),
    }


def check(kernel_sets: Mapping[str, torch.device], remedy: str) -> Finding:
    """Whether kernel sets on their devices make the vectors, byte for byte."""
    whole = load()
    wrong = {name: differences(whole, name, device) for name, device in kernel_sets.items()}
    count = len(whole["vectors"])
    details = {"vectors": count, "kernels": wrong}
    lines = [
        f"{name}: expected the checked-in bytes, got others for {found[0]} "
        f"({len(found)} of {count})"
        for name, found in wrong.items()
        if found
    ]
    if lines:
        return Finding(PROBLEM, lines, remedy, details)
    text = f"{count} test vectors, byte for byte, on {', '.join(wrong)}"
    return Finding(OK, [text], details=details)


def differences(whole: dict[str, Any], kernels: str, device: torch.device = CPU) -> list[str]:
    """What a kernel set makes differently: none, or it must not be used."""
    found = []
    for expected in whole["vectors"]:
        spec, n = expected["codec"], expected["n"]
        try:
            got = made(spec, whole["inputs"][str(n)], whole["prescale"], kernels, device)
        except WireError as error:
            found.append(f"{spec} of {n} elements: its own wire is refused: {error}")
            continue
        parts = [part for part in ("wire", "residual", "decoded") if got[part] != expected[part]]
        if parts:
            found.append(f"{spec} of {n} elements: {' and '.join(parts)}")
    return found
