"""fp8: an E4M3 number per element and a bf16 scale per block.

| section | contents                                               |
| ------- | ------------------------------------------------------ |
| scales  | ceil(n/B) scales, bf16                                 |
| codes   | n codes, 1 byte each: sign, 4 exponent, 3 mantissa bits |

    s    = min(bf16(absmax(v) / 448), 0x7b12)
    code = E4M3(v * (1 / s))          nearest, ties to even, at most 448
    d    = value(code) * s
"""

import torch
from torch import Tensor

from zcomm.codecs import arithmetic as ar
from zcomm.codecs.blocks import BlockFormat
from zcomm.codecs.format import refuse

LARGEST = 448.0
CAP = 0x7B12
# The biased fp32 exponent of 2^-6, the smallest normal E4M3 number.
_LOWEST_EXPONENT = 121


def e4m3(x: Tensor) -> Tensor:
    """int32 codes of finite x."""
    size = x.abs().clamp_max(LARGEST)
    exponent = (ar.bits(size) >> 23).clamp_min(_LOWEST_EXPONENT)
    # In units of 2^(exponent - 3): 0..8 below the normal range, 8..16 in it. A carry to 16 rolls
    # over into the next exponent.
    steps = torch.round(size * ar.power_of_two(257 - exponent)).to(torch.int32)
    code = ((exponent - _LOWEST_EXPONENT) << 3) + steps
    return code | ((ar.bits(x) >> 24) & 0x80)


def e4m3_value(code: Tensor) -> Tensor:
    """The fp32 value of int32 codes."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    steps = torch.where(exponent > 0, mantissa + 8, mantissa).to(torch.float32)
    size = steps * ar.power_of_two(exponent.clamp_min(1) + 117)
    return torch.where((code & 0x80) != 0, -size, size)


class Fp8(BlockFormat):
    name = "fp8"
    error = 6.6e-4
    width = 8

    def quantise(self, v: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
        absmax = peak.view(torch.float32)
        scale = ar.bf16_bits(absmax / ar.constant(v, LARGEST)).clamp_max(CAP)
        s = ar.bf16_value(scale.clamp_min(ar.BF16_MIN_NORMAL))
        inv = ar.constant(v, 1.0) / s
        return scale, e4m3(v * inv.unsqueeze(1))

    def values(self, codes: Tensor) -> Tensor:
        return e4m3_value(codes)

    def check_codes(self, codes: Tensor) -> None:
        refuse((codes & 0x7F) == 0x7F, "expected codes other than 0x7f and 0xff, got code", codes)
