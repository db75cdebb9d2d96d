"""sign: one bit per element and the block's mean magnitude.

| section | contents                              |
| ------- | ------------------------------------- |
| scales  | ceil(n/B) scales, bf16                |
| codes   | n sign bits, element 0 in bit 0       |

    mean = tree(|v|) / m                          where absmax(v) < 2^100
    mean = (tree(|v| * 2^-64) / m) * 2^64         elsewhere
    s    = min(bf16(mean), 0x7f7f)
    d    = s where the sign bit of v is 0, else -s
"""

import torch
from torch import Tensor

from zcomm.codecs import arithmetic as ar
from zcomm.codecs.blocks import BlockFormat

# bits(2^100): from here up, a block's sum could overflow.
_LARGE = 227 << 23


class Sign(BlockFormat):
    name = "sign"
    error = 0.36
    needs_feedback = True
    default_feedback = 0.8
    width = 1

    def quantise(self, v: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
        shift = (peak >= _LARGE).to(torch.int32) * 64
        scaled = v.abs() * ar.power_of_two(127 - shift).unsqueeze(1)
        mean = ar.tree(scaled) / ar.constant(v, v.shape[1]) * ar.power_of_two(127 + shift)
        return ar.bf16_bits(mean).clamp_max(ar.BF16_MAX), (ar.bits(v) >> 31) & 1

    def values(self, codes: Tensor) -> Tensor:
        return (1 - 2 * codes).to(torch.float32)
