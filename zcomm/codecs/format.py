"""What each codec's file provides: its properties, sizes and plain-torch reference functions."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from zcomm.wire.header import CODEC_IDS, WireError, align16
from zcomm.wire.segments import Encoded


class Format(ABC):
    """The format and all properties of one codec. Every list of codecs is derived from these.

    Reference functions take fp32 tensors on any device, n > 0.
    """

    name: ClassVar[str]
    block: int = 0  # elements that share a scale; 0 for a codec without blocks
    error: ClassVar[float]  # normalized and squared, of one encoding of Gaussian values
    needs_feedback: ClassVar[bool] = False  # whether it drops too much to work without
    default_feedback: ClassVar[bool | float] = False  # the best in benchmarks/convergence.py
    example: ClassVar[str] = ""  # the option that lists show in its spec

    @classmethod
    @abstractmethod
    def parse(cls, option: str | None) -> "Format":
        """The format for a spec string, given what follows the colon."""

    @property
    def id(self) -> int:
        """Its number on the wire; a codec that CODEC_IDS does not list sets its own."""
        return CODEC_IDS[self.name]

    @property
    @abstractmethod
    def spec(self) -> str:
        """The canonical spec string."""

    def k(self, n: int) -> int:
        """How many of n elements a selecting codec sends; 0 for other codecs."""
        return 0

    @abstractmethod
    def body_nbytes(self, n: int) -> int: ...

    @abstractmethod
    def encode_body(self, v: Tensor) -> Encoded: ...

    @abstractmethod
    def decode_body(self, body: Tensor, n: int) -> Tensor:
        """The terms to be summed over wires. A malformed body raises a WireError."""

    def finish_sum(self, terms: Tensor, n: int) -> Tensor:
        """The n decoded elements, from the summed terms."""
        return terms


def section(values: Tensor) -> Tensor:
    """The bytes of `values`, padded with zeros to a multiple of 16."""
    raw = values.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, align16(raw.numel()) - raw.numel()))


def take_section(body: Tensor, start: int, nbytes: int) -> Tensor:
    """The bytes of the section at `start`; refuses nonzero padding."""
    end = start + align16(nbytes)
    refuse(body[start + nbytes : end] != 0, "expected zero padding bytes, got another in byte")
    return body[start : start + nbytes]


def refuse(bad: Tensor, message: str, values: Tensor | None = None) -> None:
    """Raises a WireError with the first position where `bad` is true, and the value there."""
    if not bool(bad.any()):
        return
    where = int(bad.flatten().nonzero()[0])
    got = "" if values is None else f" {int(values.flatten()[where]):#x} at"
    raise WireError(f"{message}{got} {where}")
