"""lm4, lm3, lm2: a randomized Hadamard transform and a Lloyd-Max quantizer.

| section | contents                                                            |
| ------- | ------------------------------------------------------------------- |
| scales  | ceil(n/B) scales, bf16                                              |
| codes   | B codes of 4, 3 or 2 bits a block; a last block of m elements sends |
|         | b of them, b = 2^k being the least power of two >= m                |

    E     = bits(absmax(v)) >> 23           E = 0 gives a zero block
    P     = max(254 - E, 1)
    u     = sigma * (v * 2^(P - 127))
    y     = H(u)
    g     = 48 / sqrt(tree(y * y) * 2^-k)
    t     = clamp(floor(y * g), -128, 127)
    c     = the number of thresholds T <= max(t, -1 - t)
    code  = levels/2 + c where t >= 0, else levels/2 - 1 - c
    q     = level[code]
    ratio = tree(y * q) / tree(q * q)
    S     = bf16((ratio * 2^-k) * 2^(127 - P))        where E >= 249: 2^(121 - P)

    z     = q * S, summed over wires
    d     = sigma * H(z)
"""

from functools import lru_cache

import torch
from torch import Tensor

from zcomm.codecs import arithmetic as ar
from zcomm.codecs.blocks import BlockFormat
from zcomm.wire.lm_tables import LEVELS, SIGN_WORDS, STEPS, THRESHOLDS

# From this biased exponent up, the scale is made 2^6 smaller to keep H(z) finite.
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
    """What all three share; the code width selects the table."""

    def code_count(self, m: int) -> int:
        return ar.next_power_of_two(m)

    def quantise(self, v: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
        exponent = peak >> 23
        up = (254 - exponent).clamp_min(1)
        y = self._rotate(v * ar.power_of_two(up).unsqueeze(1))
        inverse_size = ar.constant(v, 1.0 / y.shape[1])
        rms = ar.sqrt(ar.tree(y * y) * inverse_size)
        codes = self._codes(y * (ar.constant(v, STEPS) / rms).unsqueeze(1))
        q = self.values(codes)
        ratio = ar.tree(y * q) / ar.tree(q * q)
        down = torch.where(exponent >= _LARGE_EXPONENT, 248 - up, 254 - up)
        scale = ar.bf16_bits((ratio * inverse_size) * ar.power_of_two(down))
        return torch.where(peak < ar.FP32_MIN_NORMAL, 0, scale), codes

    def values(self, codes: Tensor) -> Tensor:
        return _levels(self.width, codes.device)[codes.to(torch.int64)]

    def restore(self, z: Tensor, m: int) -> Tensor:
        return (ar.hadamard(z) * _signs(z.shape[1], z.device))[:, :m]

    def _rotate(self, v: Tensor) -> Tensor:
        size = self.code_count(v.shape[1])
        return ar.hadamard(ar.pad_columns(v, size) * _signs(size, v.device))

    def _codes(self, steps: Tensor) -> Tensor:
        t = steps.floor().nan_to_num(0.0).clamp(-128, 127).to(torch.int32)
        magnitude = torch.maximum(t, -1 - t)
        cell = torch.zeros_like(t)
        for threshold in THRESHOLDS[self.width]:
            cell += magnitude >= threshold
        half = len(LEVELS[self.width]) // 2
        return torch.where(t >= 0, half + cell, half - 1 - cell)


class Lm4(LloydMax):
    name = "lm4"
    error = 0.0092
    width = 4


class Lm3(LloydMax):
    name = "lm3"
    error = 0.034
    width = 3


class Lm2(LloydMax):
    name = "lm2"
    error = 0.12
    width = 2
