"""lm4, lm3, lm2: a randomised Hadamard transform and a Lloyd-Max quantiser.

| section | contents                                                            |
| ------- | ------------------------------------------------------------------- |
| scales  | ceil(n/B) scales, bf16                                              |
| codes   | B codes of 4, 3 or 2 bits a block; a last block of m elements sends |
|         | b of them, b = 2^k being the least power of two >= m                |

    u    = sigma * (v * 2^(P - 127))      E, P as for sign; E = 0 gives a zero block
    y    = H(u)
    rms  = sqrt(tree(y * y) * 2^-k)
    code = the number of midpoints M with y > M * rms
    q    = level[code]
    t    = tree(y * q) / tree(q * q)
    S    = bf16((t * 2^-k) * 2^(127 - P))        where E >= 249: 2^(121 - P)

    z    = q * S, summed over wires
    d    = sigma * H(z)
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from zcomm.codecs import arithmetic as ar
from zcomm.codecs.blocks import BlockFormat
from zcomm.codecs.lm_tables import LEVELS, SIGN_WORDS

# From this biased exponent on, the scale is made 2^6 smaller so that H(z) stays finite.
_LARGE_EXPONENT = 249


@lru_cache(maxsize=64)
def _signs(size: int, device: torch.device) -> Tensor:
    """sigma_i of the first `size` elements of a block, +1 or -1."""
    flips = [(SIGN_WORDS[i // 64] >> (i % 64)) & 1 for i in range(size)]
    return torch.tensor([1 - 2 * flip for flip in flips], dtype=torch.float32, device=device)


@lru_cache(maxsize=16)
def _levels(width: int, device: torch.device) -> Tensor:
    return torch.tensor(LEVELS[width], dtype=torch.float32, device=device)


class LloydMax(BlockFormat):
    """The common part; the width of a code picks the table."""

    midpoints: ClassVar[tuple[float, ...]]

    def code_count(self, m: int) -> int:
        return ar.next_power_of_two(m)

    def quantise(self, v: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
        exponent = peak >> 23
        up = (254 - exponent).clamp_min(1)
        y = self._rotate(v * ar.power_of_two(up).unsqueeze(1))
        inverse_size = ar.constant(v, 1.0 / y.shape[1])
        codes = self._codes(y, ar.sqrt(ar.tree(y * y) * inverse_size))
        q = self.values(codes)
        t = ar.tree(y * q) / ar.tree(q * q)
        down = torch.where(exponent >= _LARGE_EXPONENT, 248 - up, 254 - up)
        scale = ar.bf16_bits((t * inverse_size) * ar.power_of_two(down))
        return torch.where(peak < ar.FP32_MIN_NORMAL, 0, scale), codes

    def values(self, codes: Tensor) -> Tensor:
        return _levels(self.width, codes.device)[codes.to(torch.int64)]

    def restore(self, z: Tensor, m: int) -> Tensor:
        return (ar.hadamard(z) * _signs(z.shape[1], z.device))[:, :m]

    def _rotate(self, v: Tensor) -> Tensor:
        size = self.code_count(v.shape[1])
        return ar.hadamard(ar.pad_columns(v, size) * _signs(size, v.device))

    def _codes(self, y: Tensor, rms: Tensor) -> Tensor:
        codes = torch.zeros(y.shape, dtype=torch.int32, device=y.device)
        for midpoint in self.midpoints:
            codes += y > (rms * ar.constant(y, midpoint)).unsqueeze(1)
        return codes


def _midpoints(width: int) -> tuple[float, ...]:
    """Half way between neighbouring levels; exact."""
    return tuple((a + b) / 2 for a, b in zip(LEVELS[width], LEVELS[width][1:]))


class Lm4(LloydMax):
    name = "lm4"
    width = 4
    midpoints = _midpoints(4)


class Lm3(LloydMax):
    name = "lm3"
    width = 3
    midpoints = _midpoints(3)


class Lm2(LloydMax):
    name = "lm2"
    width = 2
    midpoints = _midpoints(2)
