"""What one codec's file provides: its sizes and its plain-torch reference functions."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from zcomm.wire.header import WireError, align16
from zcomm.wire.segments import Encoded


class Format(Protocol):
    """The format of one codec. Reference functions take fp32 tensors on any device, n > 0."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> str:
        """The canonical spec string."""
        ...

    @property
    def block(self) -> int:
        """Elements that share a scale; 0 for a codec without blocks."""
        ...

    def k(self, n: int) -> int:
        """How many elements of n are sent, for a codec that selects; else 0."""
        ...

    def body_nbytes(self, n: int) -> int: ...

    def encode_body(self, v: Tensor) -> Encoded: ...

    def decode_body(self, body: Tensor, n: int) -> Tensor:
        """The terms that are summed over wires. Refuses a malformed body with a WireError."""
        ...

    def finish_sum(self, terms: Tensor, n: int) -> Tensor:
        """The n decoded elements, from the sum of the terms."""
        ...


def section(values: Tensor) -> Tensor:
    """The bytes of `values`, padded with zeros to a multiple of 16."""
    raw = values.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, align16(raw.numel()) - raw.numel()))


def take_section(body: Tensor, start: int, nbytes: int) -> Tensor:
    """The bytes of the section at `start`; refuses padding that is not 0."""
    end = start + align16(nbytes)
    refuse(body[start + nbytes : end] != 0, "expected zero padding bytes, got another in byte")
    return body[start : start + nbytes]


def refuse(bad: Tensor, message: str, values: Tensor | None = None) -> None:
    """Raises a WireError that names the first position where `bad` holds, and the value there."""
    if not bool(bad.any()):
        return
    where = int(bad.flatten().nonzero()[0])
    got = "" if values is None else f" {int(values.flatten()[where]):#x} at"
    raise WireError(f"{message}{got} {where}")
