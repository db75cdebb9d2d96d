"""What Triton makes of small kernels, executed: the whole way from Python to results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulated_triton import NO_TRITON, KernelError, Kernels
from triton_compiler import Target

samples = pytest.importorskip("triton_samples", reason=NO_TRITON)

ARCHS = (80, 90, 100, 120)
every_arch = pytest.mark.parametrize("arch", ARCHS)
HERE = Path(__file__).parent


def kernels(arch: int, **options: object) -> Kernels:
    source = HERE / "triton_samples.py"
    return Kernels(
        "triton_samples", Target("cuda", arch), (source,), (str(HERE),), tuple(options.items())
    )


def launch(arch: int, key: str, grid: int, *args: Tensor | int | float) -> None:
    given = [a.data_ptr() if isinstance(a, Tensor) else a for a in args]
    kernels(arch).load(key).launch((grid,), given)


def numbers(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@every_arch
@pytest.mark.parametrize("key", ["quantise", "quantise_8"])
def test_blocks_are_quantised(arch: int, key: str) -> None:
    n = 3 * samples.ROWS * samples.BLOCK - 300
    x, rest, codes = numbers(n), torch.zeros(n), torch.zeros(n // 2, dtype=torch.uint8)
    words = torch.tensor([0, 2**62, 0, 0])
    launch(arch, key, 3, x, rest, codes, words, n)

    padded = torch.nn.functional.pad(x, (0, 300)).view(-1, samples.BLOCK)
    scale = padded.abs().amax(1, keepdim=True) / 7.0
    q = torch.round(padded * (1 / scale))
    nibbles = q.nan_to_num().to(torch.int32).view(-1, 2) & 15
    expected = (nibbles[:, 0] | nibbles[:, 1] << 4).long()
    assert torch.equal(rest, (padded - q * scale).flatten()[:n])
    assert torch.equal(codes.long(), expected[: n // 2])
    weighted = (expected * (2 * torch.arange(expected.numel()) + 1)).view(3, -1).sum(1)
    total = int(weighted.sum())
    assert words.tolist() == [total, int(weighted.min()), 3, total]


@every_arch
def test_butterflies(arch: int) -> None:
    x, out = numbers(samples.COUNT), torch.zeros(samples.COUNT)
    launch(arch, "rotate", 1, x, out)
    v = x.view(-1, 2, samples.BLOCK // 2)
    v = torch.stack((v[:, 0] + v[:, 1], v[:, 0] - v[:, 1]), 1).view(-1, 2)
    assert torch.equal(out.view(-1, 2), torch.stack((v[:, 0] + v[:, 1], v[:, 0] - v[:, 1]), 1))


@every_arch
def test_histogram_and_running_sum(arch: int) -> None:
    x, counts, sums = numbers(samples.COUNT), *torch.zeros(2, 256, dtype=torch.int32)
    launch(arch, "count_bytes", 1, x, counts, sums)
    expected = torch.bincount(x.view(torch.int32) >> 24 & 255, minlength=256)
    assert torch.equal(counts.long(), expected)
    assert torch.equal(sums.long(), expected.cumsum(0))


@every_arch
@pytest.mark.parametrize("count", [0, 1, 5])
def test_loop_over_addresses(arch: int, count: int) -> None:
    tensors = [numbers(samples.COUNT, seed).abs().half() for seed in range(count)]
    addresses = torch.tensor([t.data_ptr() for t in tensors] or [0])
    out = torch.zeros(samples.COUNT)
    launch(arch, "add_up", 1, addresses, out, count, 1 / 3)
    total = torch.zeros(samples.COUNT)
    for t in tensors:
        total = total + t.float() * torch.tensor(1 / 3)
    # Torch may use a root that is off by a bit; rounded twice, the one of fp64 is exact.
    assert torch.equal(out, total.double().sqrt().float())


def test_an_approximate_division_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"\.(full|approx) is not IEEE arithmetic"):
        kernels(90).load("divide")


def test_fused_arithmetic_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"of floats without \.rn may be fused"):
        kernels(90, enable_fp_fusion=True).load("quantise")


def test_an_access_outside_of_memory_is_an_error() -> None:
    with pytest.raises(KernelError, match=r"outside: .*outside of memory"):
        kernels(90).load("outside").launch((1,), (0,))
