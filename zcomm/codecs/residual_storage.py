"""How a residual is stored: as fp32, as bf16, or as the body of an int8 segment.

| dtype    | what is stored for r                                           |
| -------- | -------------------------------------------------------------- |
| float32  | r                                                              |
| bfloat16 | bf16(r), at most 0x7f7f for a finite r                         |
| int8     | an int8 body with the codec's block size, 128 if it has none   |

Reading a stored residual is exact. Kept elements keep their stored bytes, except with int8 storage
under a codec without blocks: there the value read back is stored again.
"""

import torch
from torch import Tensor

from zcomm.codecs import arithmetic as ar
from zcomm.codecs.blocks import DEFAULT_BLOCK
from zcomm.codecs.int8 import Int8
from zcomm.wire.header import align16


def numel(n: int, block: int, dtype: torch.dtype) -> int:
    """Storage elements for a segment of n elements."""
    return Int8(block or DEFAULT_BLOCK).body_nbytes(n) if dtype == torch.int8 else n


def read(stored: Tensor, n: int, block: int) -> Tensor:
    """The n fp32 values of a stored residual."""
    if stored.dtype == torch.float32:
        return stored
    if stored.dtype == torch.bfloat16:
        return ar.bf16_value(stored.view(torch.int16))
    scale, codes = _split_int8(stored.view(torch.uint8), n, block or DEFAULT_BLOCK)
    # No checks: this process wrote the bytes, and the formula is valid for any byte.
    return codes.view(torch.int8).to(torch.float32) * ar.bf16_value(scale)


def write(r: Tensor, kept: Tensor, stored: Tensor, block: int) -> Tensor:
    """The new storage of r; kept elements come from the old storage, `stored`."""
    if stored.dtype == torch.float32:
        return torch.where(kept, ar.bits(stored), ar.bits(r)).view(torch.float32)
    if stored.dtype == torch.bfloat16:
        new = ar.bf16_bits(r).to(torch.int16)
        return torch.where(kept, stored.view(torch.int16), new).view(torch.bfloat16)
    if not block:
        r = torch.where(kept, read(stored, r.numel(), block), r)
    body = Int8(block or DEFAULT_BLOCK).encode_body(r).body
    return (_keep_blocks(body, stored, kept, block) if block else body).view(torch.int8)


def _keep_blocks(body: Tensor, stored: Tensor, kept: Tensor, block: int) -> Tensor:
    """`body` with the scales and codes of kept blocks taken from `stored`."""
    body, old, n = body.clone(), stored.view(torch.uint8), kept.numel()
    blocks = kept[::block]
    pairs = blocks.repeat_interleave(2)
    body[: pairs.numel()] = torch.where(pairs, old[: pairs.numel()], body[: pairs.numel()])
    at = align16(pairs.numel())
    body[at : at + n] = torch.where(kept, old[at : at + n], body[at : at + n])
    return body


def _split_int8(body: Tensor, n: int, block: int) -> tuple[Tensor, Tensor]:
    """The scale pattern of every element and the code bytes."""
    blocks = -(-n // block)
    scales = body[: 2 * blocks].view(-1, 2).to(torch.int32)
    pattern = scales[:, 0] | (scales[:, 1] << 8)
    at = align16(2 * blocks)
    return pattern.repeat_interleave(block)[:n], body[at : at + n]
