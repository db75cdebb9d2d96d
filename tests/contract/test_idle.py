"""Segments that sit out a step (`keep_idle`), and segments without a residual."""

from __future__ import annotations

import pytest
import torch

import zcomm
from kernel_sets import CONTRACT_SETS
from zcomm import Layout, Residuals, Segment

SPECS = ("int8", "lm4", "sign", "topk:0.1", "bf16", "none")
STORAGES = (torch.float32, torch.bfloat16, torch.int8)
SIZES = (300, 70_000, 129)


def three_segments(spec: str) -> Layout:
    codec = zcomm.codec(spec)
    offsets = (0, SIZES[0], SIZES[0] + SIZES[1])
    return Layout([Segment(codec, n, at) for n, at in zip(SIZES, offsets)])


def filled(layout: Layout, dtype: torch.dtype) -> list[torch.Tensor]:
    """Residuals as an encoding leaves them."""
    tensors = [zcomm.codec(s.codec.spec).new_residual(s.numel, dtype) for s in layout.segments]
    generator = torch.Generator().manual_seed(3)
    layout.encode(torch.randn(layout.span, generator=generator), Residuals(layout, tensors))
    return tensors


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kernels", CONTRACT_SETS)
def test_idle_segment_sends_zeros_and_keeps_its_residual(
    kernels: str, spec: str, storage: torch.dtype, grad_dtype: torch.dtype
) -> None:
    layout = three_segments(spec)
    before = filled(layout, storage)
    inputs, outputs = [t.clone() for t in before], [torch.full_like(t, 7) for t in before]
    grad = torch.randn(layout.span, generator=torch.Generator().manual_seed(4)).to(grad_dtype)
    grad[SIZES[0] : SIZES[0] + SIZES[1]] = -0.0
    wire = layout.encode(grad, Residuals(layout, inputs, outputs), keep_idle=True, kernels=kernels)
    assert torch.equal(outputs[1], before[1])
    decoded = layout.decode(wire)
    assert not decoded[SIZES[0] : SIZES[0] + SIZES[1]].any()
    # The others are encoded as usual.
    busy = [t.clone() for t in before]
    layout.encode(grad, Residuals(layout, busy), kernels="reference")
    for i in (0, 2):
        assert torch.equal(outputs[i], busy[i])


@pytest.mark.parametrize("kernels", CONTRACT_SETS)
def test_one_element_that_is_not_zero_is_enough(kernels: str) -> None:
    layout = three_segments("lm4")
    tensors = filled(layout, torch.float32)
    expected = [t.clone() for t in tensors]
    grad = torch.zeros(layout.span)
    # Not idle: a nonzero last element, and a value that prescaling turns into zero.
    grad[-1], grad[0] = 1.0, 1e-45
    layout.encode(grad, Residuals(layout, expected), kernels="reference", prescale=1e-30)
    layout.encode(grad, Residuals(layout, tensors), keep_idle=True, kernels=kernels, prescale=1e-30)
    assert torch.equal(tensors[0], expected[0])
    assert torch.equal(tensors[2], expected[2])
    assert not torch.equal(tensors[1], expected[1])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kernels", CONTRACT_SETS)
def test_segment_without_a_residual_among_others(kernels: str, spec: str) -> None:
    layout = three_segments(spec)
    tensors = filled(layout, torch.float32)
    whole = [t.clone() for t in tensors]
    grad = torch.randn(layout.span, generator=torch.Generator().manual_seed(5))
    some = Residuals(layout, [tensors[0], None, tensors[2]])
    wire = layout.encode(grad, some, kernels=kernels)
    whole[1].zero_()
    assert torch.equal(wire, layout.encode(grad, Residuals(layout, whole), kernels="reference"))
    assert torch.equal(tensors[0], whole[0])
    assert torch.equal(tensors[2], whole[2])


def test_outputs_have_the_gaps_of_the_inputs() -> None:
    layout = three_segments("lm4")
    tensors = filled(layout, torch.float32)
    with pytest.raises(ValueError, match="segment 1 is one and None where it is None"):
        Residuals(layout, tensors, [tensors[0], None, tensors[2]])
