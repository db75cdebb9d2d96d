"""topk: sends the k = ceil(R*n) elements of largest magnitude and no others.

| section | contents                                                              |
| ------- | --------------------------------------------------------------------- |
| counts  | ceil(n/65536) counts, 4 bytes: sent elements in each range            |
| offsets | k offsets, 2 bytes: index in the range, increasing within the range   |
| values  | k values, bf16, in the order of the offsets                           |

    d = bf16(v) where sent (at most 0x7f7f; never -0), else +0

Ties go to the lower index. If any v is not finite, all counts are 0xffffffff, the rest is 0, all
elements decode to NaN, and the residual does not change.
"""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from zcomm.codecs import arithmetic as ar
from zcomm.codecs.format import Format, refuse, section, take_section
from zcomm.wire.header import WireError, align16
from zcomm.wire.segments import Encoded

# Exponents are short: a spec must not be able to ask for a million-digit number.
_DECIMAL = re.compile(r"(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?")
RANGE = 65536
_FLAGGED = 0xFFFFFFFF
_NEGATIVE_ZERO = 0x8000


def _range_count(n: int) -> int:
    return -(-n // RANGE)


@dataclass(frozen=True)
class TopK(Format):
    """`ratio` is the canonical decimal number, stored as text to stay exact."""

    ratio: str
    name: ClassVar[str] = "topk"
    error: ClassVar[float] = 0.92
    needs_feedback: ClassVar[bool] = True
    default_feedback: ClassVar[bool | float] = 0.8
    example: ClassVar[str] = ":0.01"

    @classmethod
    def parse(cls, option: str | None) -> Format:
        matched = _DECIMAL.fullmatch(option or "")
        if not matched or not 0 < Decimal(matched[0]) <= 1:
            got = repr(option) if option else "no ratio"
            raise ValueError(
                f"codec topk: expected topk:R with a decimal number 0 < R <= 1, such as topk:0.01, "
                f"got {got}"
            )
        text = f"{Decimal(matched[0]):f}"
        return cls(text.rstrip("0").rstrip(".") if "." in text else text)

    @property
    def spec(self) -> str:
        return f"topk:{self.ratio}"

    def k(self, n: int) -> int:
        return math.ceil(Fraction(self.ratio) * n)

    def body_nbytes(self, n: int) -> int:
        return align16(4 * _range_count(n)) + 2 * align16(2 * self.k(n))

    def encode_body(self, v: Tensor) -> Encoded:
        size = ar.magnitude(v)
        decoded = torch.zeros_like(v)
        if bool((size >= ar.FP32_INF).any()):
            return Encoded(self._flagged_body(v), decoded, torch.ones_like(v, dtype=torch.bool))
        order = torch.sort(size, descending=True, stable=True).indices
        index = order[: self.k(v.numel())].sort().values
        values = ar.bf16_bits(v[index])
        values = torch.where(values == _NEGATIVE_ZERO, 0, values)
        decoded[index] = ar.bf16_value(values)
        counts = torch.bincount(index // RANGE, minlength=_range_count(v.numel()))
        parts = (counts.to(torch.int32), (index % RANGE).to(torch.int16), values.to(torch.int16))
        body = torch.cat([section(part) for part in parts])
        return Encoded(body, decoded, torch.zeros_like(v, dtype=torch.bool))

    def decode_body(self, body: Tensor, n: int) -> Tensor:
        ranges, k = _range_count(n), self.k(n)
        counts = take_section(body, 0, 4 * ranges).view(torch.int32).to(torch.int64) & _FLAGGED
        at = align16(4 * ranges)
        if bool((counts == _FLAGGED).all()):
            refuse(body[at:] != 0, "expected zeros after flagged counts, got another in byte")
            return torch.full((n,), math.nan, dtype=torch.float32, device=body.device)
        index = self._indices(take_section(body, at, 2 * k), counts, n)
        values = _unsigned(take_section(body, at + align16(2 * k), 2 * k))
        infinite = (values & ar.BF16_INF) == ar.BF16_INF
        refuse(infinite, "expected finite values, got", values)
        refuse(values == _NEGATIVE_ZERO, "expected no value -0, got", values)
        terms = torch.zeros(n, dtype=torch.float32, device=body.device)
        terms[index] = ar.bf16_value(values)
        return terms

    def _flagged_body(self, v: Tensor) -> Tensor:
        body = torch.zeros(self.body_nbytes(v.numel()), dtype=torch.uint8, device=v.device)
        body[: 4 * _range_count(v.numel())] = 0xFF
        return body

    def _indices(self, raw: Tensor, counts: Tensor, n: int) -> Tensor:
        """The indices of the sent elements, in increasing order and checked to be below n."""
        starts = torch.arange(counts.numel(), device=raw.device) * RANGE
        refuse(
            counts > (n - starts).clamp_max(RANGE), "expected a count within its range, got", counts
        )
        if int(counts.sum()) != self.k(n):
            raise WireError(f"expected counts that add up to {self.k(n)}, got {int(counts.sum())}")
        index = torch.repeat_interleave(starts, counts) + _unsigned(raw)
        # Offsets are below 65536, so only the last range, which may be short, can be exceeded.
        refuse(index >= n, f"expected indices below {n}, got", index)
        refuse(index[1:] <= index[:-1], "expected increasing offsets, got", index[1:] % RANGE)
        return index


def _unsigned(raw: Tensor) -> Tensor:
    return raw.view(torch.int16).to(torch.int32) & 0xFFFF
