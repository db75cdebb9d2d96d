"""sign: one bit per element and the block's mean magnitude.

| section | contents                              |
| ------- | ------------------------------------- |
| scales  | ceil(n/B) scales, bf16                |
| codes   | n sign bits, element 0 in bit 0       |

    E    = bits(absmax(v)) >> 23          0 gives a zero block
    P    = max(254 - E, 1)
    mean = tree(|v| * 2^(P - 127)) / m
    s    = min(bf16(mean * 2^(127 - P)), 0x7f7f)
    d    = s where the sign bit of v is 0, else -s
"""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm.codecs import arithmetic as ar
from zcomm.codecs.blocks import BlockFormat


class Sign(BlockFormat):
    name = "sign"
    width = 1

    def quantise(self, v: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
        up = (254 - (peak >> 23)).clamp_min(1)
        scaled = v.abs() * ar.power_of_two(up).unsqueeze(1)
        mean = ar.tree(scaled) / ar.constant(v, v.shape[1])
        scale = ar.bf16_bits(mean * ar.power_of_two(254 - up)).clamp_max(ar.BF16_MAX)
        scale = torch.where(peak < ar.FP32_MIN_NORMAL, 0, scale)
        return scale, (ar.bits(v) >> 31) & 1

    def values(self, codes: Tensor) -> Tensor:
        return (1 - 2 * codes).to(torch.float32)
