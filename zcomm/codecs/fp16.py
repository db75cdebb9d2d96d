"""fp16: each value rounded to IEEE binary16.

| section | contents                  |
| ------- | ------------------------- |
| values  | n fp16 values, 2 bytes    |

    wire = fp16(v);  a finite v stays finite (at most 0x7bff);  NaN becomes 0x7e00
"""

import torch
from torch import Tensor

from zcomm.codecs import arithmetic as ar
from zcomm.codecs.plain import PlainFormat

LARGEST = 65504.0
_NAN = 0x7E00


class Fp16(PlainFormat):
    name = "fp16"
    error = 4.3e-8
    itemsize = 2

    def pack(self, v: Tensor) -> Tensor:
        size = ar.magnitude(v)
        finite = torch.where(size < ar.FP32_INF, v.clamp(-LARGEST, LARGEST), v)
        half = finite.to(torch.float16).view(torch.int16)
        return torch.where(size > ar.FP32_INF, _NAN, half)

    def unpack(self, raw: Tensor) -> Tensor:
        return raw.view(torch.float16).to(torch.float32)
