"""What kernels take: only int64 numbers, so that no value can select another variant.

| encode       | what it is                                                               |
| ------------ | ------------------------------------------------------------------------ |
| tables       | the address of the layout's table (plan.py)                              |
| tiles        | the address of the launch's tiles, in that table                         |
| scratch      | the address of the call's scratch memory, zero before and after          |
| grad         | the address of the gradient                                              |
| wire         | the address of the wire, a multiple of 16                                |
| residual_in  | the address of a table of addresses, one for each segment; 0: none |
| residual_out | the same, for the new residuals                                          |
| prescale     | the bits of an fp32 number                                               |
| flags        | tile.py: dtypes, checksum, keep_idle                                     |

| decode       | what it is                                                               |
| ------------ | ------------------------------------------------------------------------ |
| tables ... scratch | as above                                                           |
| wires        | the address of the first wire, or (stride 0) of a table of addresses     |
| stride       | how many bytes lie between the first bytes of wires                      |
| count        | how many wires there are                                                 |
| out          | the address of the fp32 sum                                              |
| fault        | the address of the least fault, an unsigned number                       |
| verify       | 1: checksums are verified                                                |
"""

from __future__ import annotations

ENCODE_ARGUMENTS = (
    "tables",
    "tiles",
    "scratch",
    "grad",
    "wire",
    "residual_in",
    "residual_out",
    "prescale",
    "flags",
)
DECODE_ARGUMENTS = (
    "tables",
    "tiles",
    "scratch",
    "wires",
    "stride",
    "count",
    "out",
    "fault",
    "verify",
)
ARGUMENT_TYPE = "i64"
