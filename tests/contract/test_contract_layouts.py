"""The contract's last point: threads, layouts and frames change no byte."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from contract_data import (
    FINITE_KINDS,
    GRAD_DTYPES,
    KINDS,
    SPECS,
    STORAGES,
    assert_same,
    assert_same_outcome,
    gradient,
    stored_residual,
)
from kernel_sets import COMPILED, CONTRACT_SETS
from layout_data import encode
from zcomm import Layout, Segment, codec

# Five tasks of 65,536 elements and a short task whose last block is short too.
LARGE = 5 * 65536 + 1234 + 7
BLOCKS = [spec for spec in SPECS if codec(spec).block]


@lru_cache(maxsize=2)
def large_gradient(dtype: torch.dtype) -> Tensor:
    return gradient(LARGE, list(FINITE_KINDS), dtype, patch=9000)


@pytest.mark.parametrize("storage", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_thread_count_changes_nothing(spec: str, storage: torch.dtype) -> None:
    c = codec(spec)
    layout = Layout([Segment(c, LARGE)])
    dtype = GRAD_DTYPES[SPECS.index(spec) % 3]
    grad, r = large_gradient(dtype), large_gradient(torch.float32).flip(0)
    stored = [stored_residual(c, r, storage)]
    expected = encode(layout, grad, stored, "reference")
    for kernels in COMPILED:
        for threads in (1, 2, 5):
            got = encode(layout, grad, stored, kernels, threads)
            assert_same_outcome(got, expected, f"{kernels}, {threads} threads")


def mixed_layout(seed: int, peers: int) -> Layout:
    """Segments of all codecs and of many sizes, with gaps, in any order, for several peers."""
    g = torch.Generator().manual_seed(seed)
    sizes = [0, 1, 3, 127, 129, 1000, 4096, 5003, 65536, 70001]
    segments, offset = [], 0
    for spec in SPECS * 2:
        gap, size, peer = (int(torch.randint(m, (1,), generator=g)) for m in (3, 10, peers))
        segments.append(Segment(codec(spec), sizes[size], offset + gap, peer))
        offset += gap + sizes[size]
    order = torch.randperm(len(segments), generator=g).tolist()
    return Layout([segments[i] for i in order], peers=peers + 1)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_mixed_layouts(dtype: torch.dtype, storage: torch.dtype | None) -> None:
    for seed, peers in ((1, 1), (2, 3)):
        layout = mixed_layout(seed + 10 * STORAGES.index(storage), peers)
        grad = gradient(layout.span, list(KINDS), dtype, patch=3000, seed=seed)
        r = gradient(layout.span, list(FINITE_KINDS), torch.float32, patch=3000, seed=seed + 1)
        stored = None
        if storage is not None:
            pieces = [(s.codec, r[s.offset : s.offset + s.numel]) for s in layout.segments]
            stored = [stored_residual(c, piece, storage) for c, piece in pieces]
        expected = encode(layout, grad, stored, "reference")
        for kernels in COMPILED:
            for threads in (1, 2, 3, 4, 5):
                got = encode(layout, grad, stored, kernels, threads)
                assert_same_outcome(got, expected, f"{kernels}, {threads} threads")


@pytest.mark.parametrize("kernels", CONTRACT_SETS)
@pytest.mark.parametrize("spec", BLOCKS)
def test_segment_cut_at_block_boundaries_gives_the_same_blocks(spec: str, kernels: str) -> None:
    c, n = codec(spec), 9 * 1024 + 77
    grad = gradient(n, list(KINDS), torch.float32, patch=c.block)
    r = gradient(n, list(FINITE_KINDS), torch.float32, patch=c.block, seed=1)
    ends = [1024, 2048, 5 * 1024, n]
    parts = [Segment(c, end - start, start) for start, end in zip([0, *ends], ends)]
    whole, cut = Layout([Segment(c, n)]), Layout(parts)
    one = encode(whole, grad, [r], kernels)
    many = encode(cut, grad, list(r.split([s.numel for s in parts])), kernels)
    assert_same(many.residual, one.residual, "residual")
    assert_same(many.decoded, one.decoded, "decoded")
    scales, codes = [], []
    for segment, start in zip(parts, cut.body_starts):
        blocks = -(-segment.numel // c.block)
        split = start + -(-2 * blocks // 16) * 16
        scales.append(many.wire[start : start + 2 * blocks])
        codes.append(many.wire[split : start + c.body_nbytes(segment.numel)])
    whole_blocks = -(-n // c.block)
    assert_same(torch.cat(scales), one.wire[32 : 32 + 2 * whole_blocks], "scales")
    assert_same(torch.cat(codes), one.wire[32 + -(-2 * whole_blocks // 16) * 16 :], "codes")


@pytest.mark.parametrize("spec", ["none", "bf16", "fp16", "topk:0.3"])
@pytest.mark.parametrize("kernels", CONTRACT_SETS)
def test_residual_that_is_a_nan_keeps_its_bytes(spec: str, kernels: str) -> None:
    """A signaling NaN with a payload, under a finite gradient."""
    for pattern, integer, storage in (
        (0x7FA00001, torch.int32, torch.float32),
        (0x7FA1, torch.int16, torch.bfloat16),
    ):
        residual = torch.full((40,), pattern, dtype=integer).view(storage)
        codec(spec).encode(torch.ones(40), residual, kernels=kernels)
        assert residual.view(integer).tolist() == [pattern] * 40


def digests(spec: str, kernels: str) -> list[str]:
    """Digests of wire, residual and sum for numbers near the smallest normal, on five threads."""
    layout = Layout([Segment(codec(spec), LARGE)])
    integers = torch.arange(LARGE, dtype=torch.int32) * 97 % 0x01800000
    grad = (integers | (integers % 2) << 31).view(torch.float32)
    outcome = encode(layout, grad, [grad.flip(0).clone()], kernels, threads=5)
    return [hashlib.sha256(ctypes.string_at(t.data_ptr(), t.nbytes)).hexdigest() for t in outcome]


FLUSHED = """
import sys, torch
torch.set_flush_denormal(True)
from test_contract_layouts import digests
for spec, kernels in zip(sys.argv[1::2], sys.argv[2::2]):
    print(*digests(spec, kernels))
"""


def test_threads_that_start_with_flushed_denormals_change_nothing() -> None:
    """In a new process: native worker threads inherit the mode of the thread that starts them."""
    arguments = [(spec, kernels) for spec in ("int8", "fp8", "lm4", "sign") for kernels in COMPILED]
    arguments += [("none", COMPILED[0]), ("topk:0.3", COMPILED[-1])]
    flat = [text for pair in arguments for text in pair]
    command = [sys.executable, "-c", f"import sys\nsys.path[:0] = {sys.path!r}\n{FLUSHED}", *flat]
    result = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    expected = [" ".join(digests(spec, "reference")) for spec, _ in arguments]
    assert result.stdout.splitlines() == expected
