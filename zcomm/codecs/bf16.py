"""bf16: the upper half of each fp32 value, rounded.

| section | contents                  |
| ------- | ------------------------- |
| values  | n bf16 values, 2 bytes    |

    wire = bf16(v);  a finite v stays finite (at most 0x7f7f);  NaN becomes 0x7fc0
"""

import torch
from torch import Tensor

from zcomm.codecs import arithmetic as ar
from zcomm.codecs.plain import PlainFormat


class Bf16(PlainFormat):
    name = "bf16"
    error = 2.8e-6
    itemsize = 2

    def pack(self, v: Tensor) -> Tensor:
        return ar.bf16_bits(v).to(torch.int16)

    def unpack(self, raw: Tensor) -> Tensor:
        return ar.bf16_value(raw.view(torch.int16))
