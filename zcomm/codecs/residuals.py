"""Residuals: tensors that hold what encoding left out of each segment, and their addresses."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property, reduce
from operator import or_

import torch
from torch import Tensor

from zcomm.base import arguments, cupy_arrays
from zcomm.kernels.base import KernelLayout
from zcomm.kernels.memory import upload
from zcomm.wire.segments import Segment

# The first byte, one past the last byte, and the segment.
Span = tuple[int, int, int]


class Residuals:
    """One residual per segment of a layout, all of one dtype: fp32, bf16 or int8.

    `tensors` is a sequence with one tensor per segment (None for a segment without a residual). For
    fp32 and bf16 it may also be one flat tensor that segment offsets index into. `outputs` has the
    same form and receives the new residuals, which otherwise overwrite `tensors`. The constructor
    records the addresses, so tensors must not be resized later. CuPy arrays work like tensors.
    Copying deeply or unpickling creates new tensors.
    """

    def __init__(
        self,
        layout: KernelLayout,
        tensors: Tensor | Sequence[Tensor | None],
        outputs: Tensor | Sequence[Tensor | None] | None = None,
    ) -> None:
        if not hasattr(layout, "segments"):
            raise TypeError(f"Residuals: expected a Layout, got {arguments.describe(layout)}")
        self.layout = layout
        if cupy_arrays.has_arrays(tensors):
            tensors, outputs = cupy_arrays.shared_residuals(tensors, outputs)
        self.inputs = self.outputs = _per_segment(layout, tensors, "residuals")
        first = next((t for t in self.inputs if t is not None), torch.empty(0))
        self.dtype, self.device = first.dtype, first.device
        self._given = tensors, outputs
        self._in_table, spans = self._checked_memory(self.inputs, "residual")
        # Address tables for native code: of the residuals, and of the outputs.
        self.in_addresses = self.out_addresses = self._in_table.buffer_info()[0]
        if outputs is not None:
            self.outputs = _per_segment(layout, outputs, "outputs")
            _expect_same_gaps(self.inputs, self.outputs)
            self._out_table, more = self._checked_memory(self.outputs, "output")
            self.out_addresses = self._out_table.buffer_info()[0]
            spans += more
        self._spans = _disjoint(spans) if len(spans) > 1 else spans
        self._device_tables: list[Tensor] | None = None

    @cached_property
    def address_bits(self) -> int:
        """All addresses ORed together, which shows their common alignment."""
        return reduce(or_, (start for start, _, _ in self._spans), 0)

    def addresses_on(self, device: torch.device) -> tuple[int, int]:
        """The addresses of the tables' copies in device memory; the first call uploads them."""
        if self._device_tables is None:
            tables = [self._in_table]
            if self.outputs is not self.inputs:
                tables.append(self._out_table)
            addresses = [torch.tensor(list(table), dtype=torch.int64) for table in tables]
            self._device_tables = [upload(t, device) for t in addresses]
        return self._device_tables[0].data_ptr(), self._device_tables[-1].data_ptr()

    def check(self, layout: KernelLayout, device: torch.device) -> None:
        """Refuses a layout or a device that these residuals were not made for."""
        if self.layout is not layout:
            if self.layout != layout:
                raise ValueError(
                    f"expected residuals of this layout, {layout!r}, got those of {self.layout!r}; "
                    "use Residuals(layout, ...)"
                )
            self.layout = layout  # equal, and the next call finds the same object
        if self.device != device and self.inputs:
            raise ValueError(f"expected residuals on {device}, got {self.device}; move them there")

    def expect_apart(self, what: str, start: int, end: int) -> None:
        """Refuses memory from `start` to `end` if it overlaps a residual."""
        spans = self._spans
        if spans and start < spans[-1][1] and spans[0][0] < end:
            # Spans are sorted and disjoint, so only the two around `start` can overlap.
            at = bisect_left(spans, (start, 0, 0))
            near = spans[max(at - 1, 0) : at + 1]
            if any(first < end and start < last for first, last, _ in near):
                raise arguments.overlap(what, "the residuals")

    def __repr__(self) -> str:
        nbytes = sum(end - start for start, end, _ in self._spans)
        return f"<Residuals: {len(self.inputs)} segments, {self.dtype}, {nbytes} bytes>"

    def __reduce__(self) -> tuple[object, ...]:
        # A flat tensor is copied whole: copying slices would copy all of its memory for each.
        tensors, outputs = self._given
        inputs = tensors if isinstance(tensors, Tensor) else self.inputs
        others = outputs if outputs is None or isinstance(outputs, Tensor) else self.outputs
        return Residuals, (self.layout, inputs, others)

    def _checked_memory(
        self, tensors: Sequence[Tensor | None], what: str
    ) -> tuple[array[int], list[Span]]:
        """The address and the span of each tensor; refuses one that does not fit its segment."""
        table, spans = array("q"), []
        dtype, device = self.dtype, self.device
        known = dtype in arguments.RESIDUAL_DTYPES
        for i, (segment, t) in enumerate(zip(self.layout.segments, tensors)):
            if t is None:
                table.append(0)
                continue
            numel = segment.numel
            if dtype is torch.int8:
                numel = segment.codec.residual_numel(numel, dtype)
            if (
                not known
                or t.dtype is not dtype
                or t.dim() != 1
                or t.numel() != numel
                or not t.is_contiguous()
                or t.device != device
            ):
                raise self._misfit(segment, t, numel, f"{what} {i}")
            start = t.data_ptr()
            table.append(start)
            if numel:
                spans.append((start or arguments.address(t, f"{what} {i}"), start + t.nbytes, i))
        return table, spans

    def _misfit(self, segment: Segment, t: Tensor, numel: int, what: str) -> ValueError:
        known = self.dtype in arguments.RESIDUAL_DTYPES
        dtypes = (self.dtype,) if known else arguments.RESIDUAL_DTYPES
        if t.dtype not in dtypes:
            expected, got = f"dtype {arguments.dtype_names(dtypes)}", str(t.dtype)
        elif t.device != self.device:
            expected, got = f"device {self.device}", str(t.device)
        elif t.dim() != 1 or t.numel() != numel:
            kind = f"{segment.numel} elements of {segment.codec.spec} as {t.dtype}"
            expected, got = f"shape ({numel},) for {kind}", str(tuple(t.shape))
        else:
            expected, got = "contiguous memory", f"stride {t.stride()}"
        return ValueError(f"{what}: expected {expected}, got {got}; see Codec.new_residual")


def _disjoint(spans: list[Span]) -> list[Span]:
    """The spans, sorted; refuses overlaps. A segment's output may be its input."""
    distinct = sorted(set(spans))
    for (_, end, i), (start, _, j) in zip(distinct, distinct[1:]):
        if start < end:
            raise arguments.overlap(f"the residual of segment {i}", f"that of segment {j}")
    return distinct


def _expect_same_gaps(inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> None:
    for i, (one, other) in enumerate(zip(inputs, outputs)):
        if (one is None) != (other is None):
            raise ValueError(
                f"outputs: expected a tensor where the residual of segment {i} is one and None "
                f"where it is None, got {arguments.describe(other)}"
            )


def _per_segment(
    layout: KernelLayout, tensors: Tensor | Sequence[Tensor | None], what: str
) -> tuple[Tensor | None, ...]:
    if isinstance(tensors, Tensor):
        return _slices(layout, tensors, what)
    if not isinstance(tensors, (list, tuple, Sequence)):
        got = arguments.describe(tensors)
        raise TypeError(f"{what}: expected a list of tensors or a flat tensor, got {got}")
    if len(tensors) != len(layout.segments):
        raise ValueError(
            f"{what}: expected {len(layout.segments)} tensors, one per segment, got {len(tensors)}"
        )
    for t in tensors:
        if t is not None:
            arguments.expect_tensor(t, what)
    return tuple(tensors)


def _slices(layout: KernelLayout, flat: Tensor, what: str) -> tuple[Tensor, ...]:
    arguments.expect_tensor(flat, what)
    if flat.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"{what}: expected a flat tensor of torch.float32 or torch.bfloat16, got {flat.dtype}; "
            "torch.int8 needs one tensor per segment"
        )
    if flat.dim() != 1 or not flat.is_contiguous() or flat.numel() < layout.span:
        raise ValueError(
            f"{what}: expected a contiguous 1-D tensor of {layout.span} elements, got shape "
            f"{tuple(flat.shape)} with strides {flat.stride()}"
        )
    detached = flat.detach()
    return tuple(detached[s.offset : s.offset + s.numel] for s in layout.segments)
