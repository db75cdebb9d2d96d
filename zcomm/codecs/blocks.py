"""The base of all codecs with blocks: scales, packed codes, zero blocks and NaN blocks.

| section | contents                                    |
| ------- | ------------------------------------------- |
| scales  | ceil(n/B) scales, bf16, 2 bytes each        |
| codes   | the codes of block 0, of block 1, ...       |

A segment's full blocks are the rows of one tensor, and a short last block is the only row of
another, so every function here works on whole tensors.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zcomm.codecs import arithmetic as ar
from zcomm.codecs.format import Format, refuse, section, take_section
from zcomm.wire.header import align16
from zcomm.wire.segments import Encoded

DEFAULT_BLOCK = 128
BLOCKS = (32, 64, 128, 256, 512, 1024)


def pack(codes: Tensor, width: int) -> Tensor:
    """int32 codes [blocks, c] as bytes: code i starts at bit i*width of its block's string."""
    shifts = torch.arange(width, dtype=torch.int32, device=codes.device)
    string = ((codes.unsqueeze(-1) >> shifts) & 1).flatten(1)
    string = ar.pad_columns(string, (string.shape[1] + 7) // 8 * 8)
    places = torch.arange(8, dtype=torch.int32, device=codes.device)
    return (string.view(codes.shape[0], -1, 8) << places).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """The inverse of pack: int32 codes [blocks, count]. Refuses nonzero unused bits."""
    places = torch.arange(8, dtype=torch.int32, device=packed.device)
    string = ((packed.to(torch.int32).unsqueeze(-1) >> places) & 1).flatten(1)
    unused = string[:, count * width :]
    refuse(unused != 0, "expected unused code bits of 0, got another in bit")
    shifts = torch.arange(width, dtype=torch.int32, device=packed.device)
    codes = string[:, : count * width].view(packed.shape[0], count, width) << shifts
    return codes.sum(-1, dtype=torch.int32)


@dataclass(frozen=True)
class BlockFormat(Format):
    """A codec with blocks; subclasses define how to quantize one block."""

    block: int = DEFAULT_BLOCK
    width: ClassVar[int]

    @classmethod
    def parse(cls, option: str | None) -> Format:
        if option is None:
            return cls()
        key, _, value = option.partition("=")
        if key != "block" or value not in map(str, BLOCKS):
            sizes = ", ".join(map(str, BLOCKS))
            raise ValueError(
                f"codec {cls.name}: expected the option block= one of {sizes}, got {option!r}"
            )
        return cls(int(value))

    @property
    def spec(self) -> str:
        return self.name if self.block == DEFAULT_BLOCK else f"{self.name}:block={self.block}"

    @abstractmethod
    def quantise(self, v: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
        """Scales (bf16 patterns) and codes of finite blocks; `peak` is bits(absmax).

        A scale below 0x0080 requests a zero block, whose codes are ignored.
        """

    @abstractmethod
    def values(self, codes: Tensor) -> Tensor:
        """The numbers the codes represent, in units of the scale."""

    def check_codes(self, codes: Tensor) -> None:
        """Refuses codes that encode never produces. By default it may produce all."""

    def code_count(self, m: int) -> int:
        """How many codes a block of m elements sends."""
        return m

    def restore(self, z: Tensor, m: int) -> Tensor:
        """The m elements of each block, from the sum of its terms."""
        return z

    def body_nbytes(self, n: int) -> int:
        return align16(2 * -(-n // self.block)) + align16(self._codes_nbytes(n))

    def encode_body(self, v: Tensor) -> Encoded:
        full = v.numel() // self.block * self.block
        rows = [v[:full].view(-1, self.block), v[full:].view(1, -1)]
        groups = [self._encode_blocks(group) for group in rows if group.numel()]
        scales, codes, decoded, kept = (torch.cat(parts) for parts in zip(*groups))
        body = torch.cat((section(scales.to(torch.int16)), section(codes)))
        return Encoded(body, decoded, kept)

    def decode_body(self, body: Tensor, n: int) -> Tensor:
        blocks = -(-n // self.block)
        raw = take_section(body, 0, 2 * blocks)
        scales = raw.view(torch.int16).to(torch.int32) & 0xFFFF
        _check_scales(scales)
        packed = take_section(body, align16(2 * blocks), self._codes_nbytes(n))
        full = n // self.block
        split = full * self.block * self.width // 8
        parts = []
        if full:
            parts.append(self._terms(scales[:full], packed[:split].view(full, -1), self.block))
        if n % self.block:
            parts.append(self._terms(scales[full:], packed[split:].view(1, -1), n % self.block))
        return torch.cat(parts)

    def finish_sum(self, terms: Tensor, n: int) -> Tensor:
        full = n // self.block * self.block
        parts = [self.restore(terms[:full].view(-1, self.block), self.block).reshape(-1)]
        if n > full:
            parts.append(self.restore(terms[full:].view(1, -1), n - full).reshape(-1))
        return torch.cat(parts)

    def _codes_nbytes(self, n: int) -> int:
        full, m = divmod(n, self.block)
        last = (self.code_count(m) * self.width + 7) // 8 if m else 0
        return full * self.block * self.width // 8 + last

    def _encode_blocks(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scales, packed codes, decoded elements and kept elements of blocks of equal length."""
        peak = ar.magnitude(v).amax(1)
        finite = peak < ar.FP32_INF
        row = finite.unsqueeze(1)
        scale, codes = self.quantise(torch.where(row, v, 0.0), torch.where(finite, peak, 0))
        live = finite & (scale >= ar.BF16_MIN_NORMAL)
        codes = torch.where(live.unsqueeze(1), codes, 0)
        scale = torch.where(finite, torch.where(live, scale, 0), ar.BF16_NAN)
        decoded = self.restore(self._scaled(scale, codes), v.shape[1])
        # A zero block's residual is v itself, including the signs of zeros.
        decoded = torch.where(live.unsqueeze(1), decoded, 0.0)
        kept = (~row).expand(v.shape)
        return scale, pack(codes, self.width).view(-1), decoded.reshape(-1), kept.reshape(-1)

    def _scaled(self, scale: Tensor, codes: Tensor) -> Tensor:
        """value(code) * scale, an exact product; +0 in a zero block, whatever code 0 means."""
        scale = scale.unsqueeze(1)
        return torch.where(scale == 0, 0.0, self.values(codes) * ar.bf16_value(scale))

    def _terms(self, scale: Tensor, packed: Tensor, m: int) -> Tensor:
        codes = unpack(packed, self.width, self.code_count(m))
        dead = ((scale == 0) | (scale == ar.BF16_NAN)).unsqueeze(1)
        refuse(dead & (codes != 0), "expected code 0 in a zero or NaN block, got code", codes)
        self.check_codes(codes)
        return self._scaled(scale, codes).reshape(-1)


def _check_scales(scale: Tensor) -> None:
    normal = (scale >= ar.BF16_MIN_NORMAL) & (scale <= ar.BF16_MAX)
    good = normal | (scale == 0) | (scale == ar.BF16_NAN)
    refuse(~good, "expected scales 0x0, 0x80 to 0x7f7f or 0x7fc0, got", scale)
