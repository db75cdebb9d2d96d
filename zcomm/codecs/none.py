"""none: the values themselves.

| section | contents                  |
| ------- | ------------------------- |
| values  | n fp32 values, 4 bytes    |

    wire = v;  NaN becomes 0x7fc00000
"""

import torch
from torch import Tensor

from zcomm.codecs import arithmetic as ar
from zcomm.codecs.plain import PlainFormat


class Plain(PlainFormat):
    name = "none"
    error = 1e-12  # from summing; the codec itself is lossless
    itemsize = 4

    def pack(self, v: Tensor) -> Tensor:
        return ar.bits(ar.canonical_nan(v))

    def unpack(self, raw: Tensor) -> Tensor:
        return raw.view(torch.float32)
