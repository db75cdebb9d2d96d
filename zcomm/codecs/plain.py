"""What none, bf16 and fp16 share: one section of n values, and NaN or Inf per element."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from zcomm.codecs import arithmetic as ar
from zcomm.codecs.format import Format, section, take_section
from zcomm.wire.header import align16
from zcomm.wire.segments import Encoded


@dataclass(frozen=True)
class PlainFormat(Format):
    """A codec that sends every element as a number of its own."""

    itemsize: ClassVar[int]

    @classmethod
    def parse(cls, option: str | None) -> Format:
        if option is not None:
            raise ValueError(f"codec {cls.name}: expected no option, got {option!r}")
        return cls()

    @property
    def spec(self) -> str:
        return self.name

    @abstractmethod
    def pack(self, v: Tensor) -> Tensor:
        """v as integers of the wire's size."""

    @abstractmethod
    def unpack(self, raw: Tensor) -> Tensor:
        """The fp32 values of the wire's bytes."""

    def body_nbytes(self, n: int) -> int:
        return align16(n * self.itemsize)

    def encode_body(self, v: Tensor) -> Encoded:
        packed = self.pack(v)
        return Encoded(section(packed), self.unpack(packed), ar.magnitude(v) >= ar.FP32_INF)

    def decode_body(self, body: Tensor, n: int) -> Tensor:
        return self.unpack(take_section(body, 0, n * self.itemsize))
