"""The base of none, bf16 and fp16: one section of n values; each element may be NaN or Inf."""

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
    """A codec that sends each element as a separate number."""

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
        """v as integers of the size used on the wire."""

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
