"""The base of int8 and int4: absmax scaling to a symmetric range of integers.

With Q the largest code:

    s    = min(bf16(absmax(v) / Q), cap)
    inv  = 1 / s
    code = clamp(rne(v * inv), -Q, Q)
    d    = code * s
"""

from typing import ClassVar

import torch
from torch import Tensor

from zcomm.codecs import arithmetic as ar
from zcomm.codecs.blocks import BlockFormat
from zcomm.codecs.format import refuse


class UniformFormat(BlockFormat):
    """Two's complement codes in -limit..limit; `cap` keeps limit * scale finite."""

    limit: ClassVar[int]
    cap: ClassVar[int]

    def quantise(self, v: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
        absmax = peak.view(torch.float32)
        scale = ar.bf16_bits(absmax / ar.constant(v, self.limit)).clamp_max(self.cap)
        s = ar.bf16_value(scale.clamp_min(ar.BF16_MIN_NORMAL))
        inv = ar.constant(v, 1.0) / s
        code = torch.round(v * inv.unsqueeze(1)).clamp(-self.limit, self.limit)
        return scale, code.to(torch.int32) & ((1 << self.width) - 1)

    def values(self, codes: Tensor) -> Tensor:
        half = 1 << (self.width - 1)
        return ((codes ^ half) - half).to(torch.float32)

    def check_codes(self, codes: Tensor) -> None:
        lowest = 1 << (self.width - 1)
        refuse(codes == lowest, f"expected codes of at least -{self.limit}, got code", codes)
