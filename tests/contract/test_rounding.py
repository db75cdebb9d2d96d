"""Values halfway between two codes round to the even one, in every kernel set."""

from __future__ import annotations

import pytest
import torch

from contract_data import assert_same
from kernel_sets import CONTRACT_SETS
from zcomm import codec

# The first value makes the scale 1, so the others are exact ties.
HALFWAY = {
    "int8": ([127.0, 0.5, 1.5, 2.5, 125.5, 126.5], [127.0, 0.0, 2.0, 2.0, 126.0, 126.0]),
    "int4": ([7.0, 0.5, 1.5, 2.5, 5.5, 6.5], [7.0, 0.0, 2.0, 2.0, 6.0, 6.0]),
    "fp8": ([448.0, 17.0, 19.0, 21.0, 432.0, 2.0**-10], [448.0, 16.0, 20.0, 20.0, 448.0, 0.0]),
    "bf16": ([1.0, 257.0, 259.0, 2.0**-134, 3 * 2.0**-134], [1.0, 256.0, 260.0, 0.0, 2.0**-132]),
    "fp16": ([1.0, 2049.0, 2051.0, 2.0**-25, 3 * 2.0**-25], [1.0, 2048.0, 2052.0, 0.0, 2.0**-23]),
}


@pytest.mark.parametrize("kernels", CONTRACT_SETS)
@pytest.mark.parametrize("name", HALFWAY)
def test_half_way_goes_to_even(name: str, kernels: str) -> None:
    values, expected = (torch.tensor(numbers) for numbers in HALFWAY[name])
    for n in (values.numel(), 128, 200):
        repeats = -(-n // values.numel())
        x, d = values.repeat(repeats)[:n], expected.repeat(repeats)[:n]
        for sign in (1.0, -1.0):
            residual = torch.zeros(n)
            wire = codec(name).encode(x * sign, residual, kernels=kernels)
            decoded = codec(name).decode(wire, n, kernels=kernels)
            assert torch.equal(decoded, d * sign)
            assert_same(residual, x * sign - decoded, f"residual, n {n}")
