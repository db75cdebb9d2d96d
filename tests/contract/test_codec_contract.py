"""The numerics contract, for every codec, kernel set, gradient dtype and residual storage.

test_contract_layouts.py tests its last point (threads and layouts), test_hostile_wire.py its sixth.
"""

from __future__ import annotations

import math
from functools import cache, partial
from itertools import accumulate

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from contract_data import (
    CASES,
    FINITE_KINDS,
    GRAD_DTYPES,
    KINDS,
    PRESCALES,
    SPECS,
    STORAGES,
    Case,
    Outcome,
    assert_same,
    assert_same_outcome,
    bits,
    block_scales,
    canonical_nan,
    gradient,
    inputs,
    per_block,
    reference,
    run,
    run_case,
    stored_residual,
)
from kernel_sets import COMPILED, CONTRACT_SETS
from zcomm import Codec, Layout, Residuals, Segment, codec

FP32_MAX = torch.finfo(torch.float32).max

every_kernel_set = pytest.mark.parametrize("kernels", CONTRACT_SETS)
every_codec = pytest.mark.parametrize("spec", SPECS)
every_dtype = pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
every_storage = pytest.mark.parametrize("storage", STORAGES, ids=str)


# 1. Same bytes everywhere.


@every_kernel_set
@every_storage
@every_dtype
@every_codec
def test_same_bytes_as_the_reference(
    spec: str, dtype: torch.dtype, storage: torch.dtype | None, kernels: str
) -> None:
    """At addresses 0 to 3 bytes off alignment; this tests the reference too."""
    for case in CASES:
        expected = reference(spec, dtype, storage, case)
        got = run_case(kernels, spec, dtype, storage, case)
        assert_same_outcome(got, expected, case)


@hypothesis.settings(max_examples=12)
@hypothesis.given(
    n=st.integers(0, 700),
    kinds=st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=6),
    patch=st.sampled_from([1, 7, 32, 128]),
    dtype=st.sampled_from(GRAD_DTYPES),
    storage=st.sampled_from(STORAGES),
    prescale=st.sampled_from(PRESCALES),
    shift=st.integers(0, 63),
)
@every_codec
def test_same_bytes_for_any_mixture(
    spec: str,
    n: int,
    kinds: list[str],
    patch: int,
    dtype: torch.dtype,
    storage: torch.dtype | None,
    prescale: float,
    shift: int,
) -> None:
    grad = gradient(n, kinds, dtype, patch=patch, seed=n)
    finite = [kind for kind in kinds if kind in FINITE_KINDS] or ["normal"]
    r = gradient(n, finite, torch.float32, patch=patch, seed=n + 1)
    residual = None if storage is None else stored_residual(codec(spec), r, storage)
    expected = run("reference", spec, grad, residual, prescale=prescale)
    for kernels in COMPILED:
        got = run(kernels, spec, grad, residual, prescale=prescale, shift=shift)
        assert_same_outcome(got, expected, kernels)


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    patterns=st.lists(st.integers(0, 2**32 - 1), max_size=70),
    prescale=st.integers(-(2**31), 2**31 - 1).filter(lambda u: u & 0x7F800000 != 0x7F800000),
)
@every_codec
def test_same_bytes_for_any_patterns(spec: str, patterns: list[int], prescale: int) -> None:
    factor = torch.tensor(prescale, dtype=torch.int32).view(torch.float32).item()
    u = torch.tensor(patterns, dtype=torch.int64)
    grad = torch.where(u < 2**31, u, u - 2**32).to(torch.int32).view(torch.float32)
    residual = torch.where(grad.isfinite(), grad, 1.0).flip(0)
    expected = run("reference", spec, grad, residual, prescale=factor)
    for kernels in COMPILED:
        got = run(kernels, spec, grad, residual, prescale=factor)
        assert_same_outcome(got, expected, kernels)


@every_kernel_set
@every_codec
def test_flushed_denormals_change_nothing(spec: str, kernels: str) -> None:
    cases = [Case(1153, turn) for turn in (3, 4, 7, 10)]
    for storage in (torch.float32, torch.int8):
        expected = [reference(spec, torch.float32, storage, case) for case in cases]
        arguments = [inputs(spec, torch.float32, storage, case) for case in cases]
        torch.set_flush_denormal(True)
        got = [
            run(kernels, spec, *pair, prescale=case.prescale)
            for pair, case in zip(arguments, cases)
        ]
        torch.set_flush_denormal(False)
        for case, a, b in zip(cases, got, expected):
            assert_same_outcome(a, b, case)


# 2. Replicas stay bit-identical.


def nine_outcomes(spec: str, n: int) -> list[Outcome]:
    cases = [Case(n, turn) for turn in (4, 0, 5, 1, 2, 9, 6, 7, 3)]
    return [reference(spec, torch.float32, torch.float32, case) for case in cases]


@cache
def reference_sum(spec: str, n: int, count: int) -> Tensor:
    wires = [outcome.wire for outcome in nine_outcomes(spec, n)[:count]]
    return codec(spec).decode_sum(wires, n, kernels="reference")


@every_kernel_set
@every_codec
def test_sums_of_one_to_nine_wires(spec: str, kernels: str) -> None:
    """The reference's bits, twice; for codecs without rotation, also the sum in order."""
    c = codec(spec)
    for n in (5, 129, 1153):
        outcomes = nine_outcomes(spec, n)
        wires = [outcome.wire for outcome in outcomes]
        sums = list(accumulate((o.decoded for o in outcomes), torch.add))
        before = torch.stack(wires)
        for count in range(1, 10):
            given = wires[:count] if count % 2 else before[:count]
            got = c.decode_sum(given, n, kernels=kernels)
            assert_same(got, c.decode_sum(given, n, kernels=kernels), "second time")
            assert_same(got, reference_sum(spec, n, count), f"{count} wires, n {n}")
            if not spec.startswith("lm"):
                assert_same(got, canonical_nan(sums[count - 1]), f"{count} terms, n {n}")
        assert torch.equal(torch.stack(wires), before)


@cache
def wires_of_many_magnitudes(spec: str) -> tuple[list[Tensor], Tensor]:
    """Five wires whose sum depends on the order of addition, and that sum."""
    c, n = codec(spec), 1153
    # topk sends the largest elements, which are the same in all wires.
    size = torch.where(torch.arange(n) < c.k(n), 9.0, 1.0)
    grads = [
        (gradient(n, ["normal"], torch.float32, seed=w) % 1.0 + 1.0) * size * 2.0**power
        for w, power in enumerate((0, 23, 11, -2, 22))
    ]
    wires = [c.encode(grad, kernels="reference") for grad in grads]
    return wires, c.decode_sum(wires, n, kernels="reference")


@every_kernel_set
@every_codec
def test_sums_are_taken_in_the_order_of_the_wires(spec: str, kernels: str) -> None:
    wires, expected = wires_of_many_magnitudes(spec)
    assert_same(codec(spec).decode_sum(wires, 1153, kernels=kernels), expected, "sum")
    for i, j in ((0, 2), (1, 3), (0, 4)):
        swapped = list(wires)
        swapped[i], swapped[j] = wires[j], wires[i]
        other = codec(spec).decode_sum(swapped, 1153, kernels="reference")
        if not torch.equal(other, expected):
            return
    raise AssertionError("expected inputs whose sum depends on the order")


# 3. Nothing is lost. 4. Not-a-number is loud.


def value_to_send(c: Codec, grad: Tensor, residual: Tensor | None, prescale: float) -> Tensor:
    v = grad.float() * torch.tensor(prescale, dtype=torch.float32)
    return v if residual is None else v + c.read_residual(residual, grad.numel())


def loud(c: Codec, v: Tensor) -> Tensor:
    """The elements whose residual does not change."""
    if c.name == "topk":
        return (~v.isfinite()).any().expand(v.shape)
    return per_block(~v.isfinite(), c.block) if c.block else ~v.isfinite()


def left_out(c: Codec, v: Tensor, wire: Tensor, decoded: Tensor) -> Tensor:
    """fl(v - d), rounded once and clamped to the largest number."""
    if c.name.startswith("lm"):
        zero_block = block_scales(wire[32:], v.numel(), c.block) == 0
        decoded = torch.where(zero_block, 0.0, decoded)  # a rotated zero may be -0
    return (v - decoded).clamp(-FP32_MAX, FP32_MAX)


def assert_within_half_a_step(c: Codec, stored: Tensor, r: Tensor, free: Tensor) -> None:
    """Checks finite r in storage, where `free`, against each dtype's exact bound.

    fp32: r itself. bf16: |error| <= max(2^-8 |r|, 2^-134), half the spacing of bf16, including
    saturation at 0x7f7f. int8: |error| <= s/2 (1 + 2^-14), where s is the block's scale and the
    factor covers rounding 1/s and r/s; blocks below the smallest scale drop |r| < 127.5 * 2^-126.
    """
    if stored.dtype == torch.float32:
        assert_same(stored[free], r[free], "residual")
        return
    error = (c.read_residual(stored, r.numel()).double() - r.double()).abs()
    if stored.dtype == torch.bfloat16:
        bound = (r.double().abs() * 2.0**-8).clamp_min(2.0**-134)
    else:
        scale = block_scales(stored, r.numel(), c.block or 128)
        step = (scale << 16).view(torch.float32).double()
        bound = torch.where(scale == 0, 127.5 * 2.0**-126, step * (0.5 + 2.0**-15))
    assert bool((error <= bound)[free].all())


@every_kernel_set
@pytest.mark.parametrize("storage", STORAGES[1:], ids=str)
@every_codec
def test_nothing_is_lost(spec: str, storage: torch.dtype, kernels: str) -> None:
    c = codec(spec)
    for case, dtype in ((case, dtype) for case in CASES for dtype in GRAD_DTYPES):
        grad, old = inputs(spec, dtype, storage, case)
        assert old is not None
        outcome = reference if kernels == "reference" else partial(run_case, kernels)
        wire, new, d = outcome(spec, dtype, storage, case)
        v = value_to_send(c, grad, old, case.prescale)
        kept = loud(c, v)
        r = left_out(c, v, wire, d)
        if storage == torch.int8 and not c.block:
            r, kept = torch.where(kept, c.read_residual(old, case.n), r), torch.zeros_like(kept)
        assert_within_half_a_step(c, new, r, ~kept)
        if storage == torch.float32:
            # One rounding: |d + r' - v| <= 2^-24 |v - d|; the factor covers the test's own fp64.
            exact = v.double() - d.double()
            error = (exact - new.double()).abs()[~kept & (r.abs() < FP32_MAX)]
            assert bool((error <= exact.abs()[~kept & (r.abs() < FP32_MAX)] * 2.0**-23.9999).all())


@every_kernel_set
@every_storage
@every_codec
def test_nan_is_loud_and_keeps_its_residual(
    spec: str, storage: torch.dtype | None, kernels: str
) -> None:
    c = codec(spec)
    seen = 0
    for bad, n, at in (("NaN", 700, 2), ("Inf", 1153, 1), ("-Inf", 1, 0), ("Inf", 129, 1)):
        kinds = ["normal", "ties", "constant", "outlier"]
        kinds[at] = bad
        grad = gradient(n, kinds, torch.float32, patch=c.block or 128)
        r = gradient(n, ["wide", "normal"], torch.float32, patch=16, seed=3).clamp(-1e30, 1e30)
        old = None if storage is None else stored_residual(c, r, storage)
        _, new, d = run(kernels, spec, grad, old)
        v = value_to_send(c, grad, old, 1.0)
        kept = loud(c, v)
        seen += int(kept.sum())
        if c.block or c.name == "topk":
            assert_same(d[kept], torch.full_like(d[kept], math.nan), f"{bad} decoded")
            assert bool(d[~kept].isfinite().all())
        else:
            assert_same(d[kept], v[kept], f"{bad} decoded")
        if old is None:
            continue
        if storage != torch.int8:
            assert_same(new[kept], old[kept], f"residual of {bad}")
        elif c.block:
            codes = old.numel() - (n + 15) // 16 * 16
            assert_same(new[codes:][:n][kept], old[codes:][:n][kept], f"codes under {bad}")
            scales = block_scales(new, n, c.block), block_scales(old, n, c.block)
            assert torch.equal(scales[0][kept], scales[1][kept])
    assert seen


@every_kernel_set
@pytest.mark.parametrize("storage", STORAGES[1:], ids=str)
@every_codec
def test_outputs_are_written_whole_and_in_place(
    spec: str, storage: torch.dtype, kernels: str
) -> None:
    """Old bytes in out= and in a second residual buffer do not matter."""
    c, case = codec(spec), Case(1153, 3)
    grad, old = inputs(spec, torch.float32, storage, case)
    expected = reference(spec, torch.float32, storage, case)
    assert old is not None
    layout, dirty = Layout([Segment(c, case.n)]), torch.full_like(bits(old), 0x55).view(storage)
    wire = torch.full_like(expected.wire, 0x55)
    addresses = wire.data_ptr(), dirty.data_ptr()
    held = Residuals(layout, [old], [dirty])
    same = layout.encode(grad, held, out=wire, prescale=case.prescale, kernels=kernels)
    assert same is wire
    assert addresses == (wire.data_ptr(), dirty.data_ptr())
    assert_same(wire, expected.wire, "wire")
    assert_same(dirty, expected.residual, "residual")
    in_place = old.clone()
    c.encode(grad, in_place, prescale=case.prescale, kernels=kernels)
    assert_same(in_place, expected.residual, "residual in place")
    out = torch.full((case.n,), -3.0)
    assert c.decode(wire, case.n, out=out, kernels=kernels) is out
    assert_same(out, expected.decoded, "decoded")
