"""Sums and transforms of a tile's rows, in the order that the wire format fixes.

A reshape moves nothing, and the sum of an axis of two elements is one addition: in registers, or
between two lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zcomm.kernels.triton.bits import bits, from_bits, magnitude


@triton.jit
def absmax(v: tl.tensor) -> tl.tensor:
    """Of each row, as bits; at least INF if the row is not finite."""
    return tl.max(magnitude(v), 1)


@triton.jit
def tree(t: tl.tensor, ROWS: tl.constexpr, LOG2: tl.constexpr) -> tl.tensor:
    """The sum of each row by halving strides: t_i + t_(i + b/2), then b/4, ..., 1.

    Both elements of a pair become their sum, so that in the end all of a row have the row's. (Of
    halves that shrink, the last would be in no lane's own register, and the compiler might make all
    that depends on it so.)
    """
    for i in tl.static_range(LOG2):
        pairs = tl.reshape(t, (ROWS, 1 << i, 2, 1 << (LOG2 - 1 - i)))
        sums = tl.expand_dims(tl.sum(pairs, 2), 2)
        t = tl.reshape(tl.broadcast_to(sums, pairs.shape), (ROWS, 1 << LOG2))
    return from_bits(tl.max(bits(t), 1))


@triton.jit
def butterfly(
    t: tl.tensor, LOG2_STRIDE: tl.constexpr, ROWS: tl.constexpr, LOG2: tl.constexpr
) -> tl.tensor:
    """Pairs that lie 2^LOG2_STRIDE apart become their sum and their difference."""
    own = tl.reshape(t, (ROWS, 1 << (LOG2 - 1 - LOG2_STRIDE), 2, 1 << LOG2_STRIDE))
    # The pair's sum of bits, minus this element's, is the partner's.
    pair = tl.sum(bits(own), 2)
    other = from_bits(tl.expand_dims(pair, 2) - bits(own))
    upper = tl.reshape(tl.arange(0, 2), (1, 1, 2, 1)) == 1
    return tl.reshape(tl.where(upper, other - own, own + other), (ROWS, 1 << LOG2))


@triton.jit
def hadamard(t: tl.tensor, size: tl.tensor, ROWS: tl.constexpr, LOG2: tl.constexpr) -> tl.tensor:
    """The unnormalized Hadamard transform of each row's first `size` elements, a power of two."""
    for i in tl.static_range(LOG2):
        t = tl.where(size[:, None] > (1 << i), butterfly(t, i, ROWS, LOG2), t)
    return t
