"""Residuals: the tensors that keep what a layout's segments left out, and their addresses."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from zcomm.kernels.base import LayoutSegment

_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


class ResidualLayout(Protocol):
    """What residuals need of a layout, which lies above."""

    @property
    def segments(self) -> Sequence[LayoutSegment]: ...
    @property
    def span(self) -> int: ...


class Residuals:
    """One residual per segment of a layout, all of one dtype: fp32, bf16 or int8.

    `tensors` is a sequence with a tensor for each segment, or, for fp32 and bf16, one flat tensor
    that the segments' offsets refer to. `outputs`, of the same form, receives the new residuals;
    without it they overwrite `tensors`. The addresses are taken here, once: a tensor must not be
    resized afterwards.
    """

    def __init__(
        self,
        layout: ResidualLayout,
        tensors: Tensor | Sequence[Tensor],
        outputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        self.layout = layout
        self.inputs = _per_segment(layout, tensors, "residuals")
        self.outputs = self.inputs
        first = self.inputs[0] if self.inputs else torch.empty(0)
        self.dtype, self.device = first.dtype, first.device
        self._check_tensors(self.inputs, "residual")
        self.in_addresses = self.out_addresses = _addresses(self.inputs)
        if outputs is not None:
            self.outputs = _per_segment(layout, outputs, "outputs")
            self._check_tensors(self.outputs, "output")
            self.out_addresses = _addresses(self.outputs)
        if len(self.inputs) > 1 or outputs is not None:
            _check_overlap(self.inputs, self.outputs)

    def check(self, layout: ResidualLayout, device: torch.device) -> None:
        """Refuses a layout that these residuals were not made for, or another device."""
        if self.layout is not layout:
            raise ValueError(
                "expected residuals of this layout, got another's; use Residuals(layout, ...)"
            )
        if self.device != device and self.inputs:
            raise ValueError(f"expected residuals on {device}, got {self.device}; move them there")

    def _check_tensors(self, tensors: Sequence[Tensor], what: str) -> None:
        for i, (segment, t) in enumerate(zip(self.layout.segments, tensors)):
            if t.dtype != self.dtype or t.dtype not in _DTYPES:
                expected = self.dtype if self.dtype in _DTYPES else "float32, bfloat16 or int8"
                raise ValueError(f"{what} {i}: expected dtype {expected}, got {t.dtype}")
            numel = segment.codec.residual_numel(segment.numel, t.dtype)
            if t.dim() != 1 or t.shape[0] != numel:
                raise ValueError(
                    f"{what} {i}: expected shape ({numel},) for {segment.numel} elements of "
                    f"{segment.codec.spec} as {t.dtype}, got {tuple(t.shape)}; see new_residual"
                )
            if not t.is_contiguous():
                raise ValueError(f"{what} {i}: expected contiguous memory, got stride {t.stride()}")
            if t.device != self.device:
                raise ValueError(f"{what} {i}: expected device {self.device}, got {t.device}")


def _per_segment(
    layout: ResidualLayout, tensors: Tensor | Sequence[Tensor], what: str
) -> tuple[Tensor, ...]:
    if isinstance(tensors, Tensor):
        return _slices(layout, tensors, what)
    if len(tensors) != len(layout.segments):
        raise ValueError(
            f"{what}: expected {len(layout.segments)} tensors, one per segment, got {len(tensors)}"
        )
    return tuple(tensors)


def _slices(layout: ResidualLayout, flat: Tensor, what: str) -> tuple[Tensor, ...]:
    if flat.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"{what}: expected a flat tensor of float32 or bfloat16, got {flat.dtype}; "
            "int8 needs one tensor per segment"
        )
    if flat.dim() != 1 or not flat.is_contiguous() or flat.shape[0] < layout.span:
        raise ValueError(
            f"{what}: expected a contiguous 1-D tensor of {layout.span} elements, got shape "
            f"{tuple(flat.shape)} with strides {flat.stride()}"
        )
    detached = flat.detach()
    return tuple(detached[s.offset : s.offset + s.numel] for s in layout.segments)


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    table = array("q", [t.data_ptr() for t in tensors])
    # Sharing the array's memory takes a quarter of the time that torch.tensor does.
    return torch.frombuffer(table or array("q", [0]), dtype=torch.int64)[: len(table)]


def _check_overlap(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Refuses memory that belongs to two segments; a segment's input may be its own output."""
    owners: dict[tuple[int, int], int] = {}
    for tensors in (inputs, outputs):
        for i, t in enumerate(tensors):
            span = (t.data_ptr(), t.data_ptr() + t.nbytes)
            if t.nbytes and owners.setdefault(span, i) != i:
                raise ValueError(
                    f"expected separate residuals, got one for segments {owners[span]} and {i}"
                )
    spans = sorted(owners)
    for (start, end), (following, _) in zip(spans, spans[1:]):
        if following < end:
            raise ValueError(
                f"expected separate residuals, got an overlap at segment {owners[start, end]}"
            )
