"""int8: a signed byte per element and a bf16 scale per block.

| section | contents                                   |
| ------- | ------------------------------------------ |
| scales  | ceil(n/B) scales, bf16                     |
| codes   | n codes, two's complement, 1 byte each     |

    s    = min(bf16(absmax(v) / 127), 0x7c01)
    code = clamp(rne(v * (1 / s)), -127, 127)
    d    = code * s

8-bit residuals use this format too (residual_storage.py).
"""

from zcomm.codecs.uniform import UniformFormat


class Int8(UniformFormat):
    name = "int8"
    error = 4.2e-5
    width = 8
    limit = 127
    cap = 0x7C01
