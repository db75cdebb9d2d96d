"""What one codec's file provides: its facts, its sizes and its plain-torch reference functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from zcomm.wire.header import CODEC_IDS, WireError, align16
from zcomm.wire.segments import Encoded


class Format(ABC):
    """The format of one codec and all facts about it. Every list of codecs derives from these.

    Reference functions take fp32 tensors on any device, n > 0.
    """

    name: ClassVar[str]
    block: int = 0  # elements that share a scale; 0: a codec without blocks
    error: ClassVar[float]  # normalized and squared, of one encoding of Gaussian values
    needs_feedback: ClassVar[bool] = False  # whether it leaves out too much to work without
    default_feedback: ClassVar[bool | float] = False  # benchmarks/convergence.py: what is best
    example: ClassVar[str] = ""  # the option of its spec in lists

    @classmethod
    @abstractmethod
    def parse(cls, option: str | None) -> Format:
        """The format of a spec string, from what follows the colon."""

    @property
    def id(self) -> int:
        """Its number on the wire; a codec that CODEC_IDS does not list sets its own."""
        return CODEC_IDS[self.name]

    @property
    @abstractmethod
    def spec(self) -> str:
        """The canonical spec string."""

    def k(self, n: int) -> int:
        """How many elements of n are sent, for a codec that selects; else 0."""
        return 0

    @abstractmethod
    def body_nbytes(self, n: int) -> int: ...

    @abstractmethod
    def encode_body(self, v: Tensor) -> Encoded: ...

    @abstractmethod
    def decode_body(self, body: Tensor, n: int) -> Tensor:
        """The terms that are summed over wires. Refuses a malformed body with a WireError."""

    def finish_sum(self, terms: Tensor, n: int) -> Tensor:
        """The n decoded elements, from the sum of the terms."""
        return terms


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
