"""int4: 4 bits per element and a bf16 scale per block.

| section | contents                                                        |
| ------- | --------------------------------------------------------------- |
| scales  | ceil(n/B) scales, bf16                                          |
| codes   | n codes, two's complement, 4 bits each, the even index low      |

    s    = min(bf16(absmax(v) / 7), 0x7e12)
    code = clamp(rne(v * (1 / s)), -7, 7)
    d    = code * s
"""

from zcomm.codecs.uniform import UniformFormat


class Int4(UniformFormat):
    name = "int4"
    error = 0.014
    width = 4
    limit = 7
    cap = 0x7E12
