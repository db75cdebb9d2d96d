"""What none, bf16 and fp16 share: one section of n values, and NaN or Inf per element."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from zcomm.codecs import arithmetic as ar
from zcomm.codecs.format import section, take_section
from zcomm.wire.header import align16
from zcomm.wire.segments import Encoded


@dataclass(frozen=True)
class PlainFormat(ABC):
    """A codec that sends every element as a number of its own."""

    name: ClassVar[str]
    itemsize: ClassVar[int]
    block: ClassVar[int] = 0

    @property
    def spec(self) -> str:
        return self.name

    @abstractmethod
    def pack(self, v: Tensor) -> Tensor:
        """v as integers of the wire's size."""

    @abstractmethod
    def unpack(self, raw: Tensor) -> Tensor:
        """The fp32 values of the wire's bytes."""

    def k(self, n: int) -> int:
        return 0

    def body_nbytes(self, n: int) -> int:
        return align16(n * self.itemsize)

    def encode_body(self, v: Tensor) -> Encoded:
        packed = self.pack(v)
        return Encoded(section(packed), self.unpack(packed), ar.magnitude(v) >= ar.FP32_INF)

    def decode_body(self, body: Tensor, n: int) -> Tensor:
        return self.unpack(take_section(body, 0, n * self.itemsize))

    def finish_sum(self, terms: Tensor, n: int) -> Tensor:
        return terms
