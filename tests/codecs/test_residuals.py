"""Residuals: their memory, their copies, and refused overlaps."""

from __future__ import annotations

import copy
import ctypes
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernel_sets import KERNEL_SETS
from layout_data import PARTS, gradient
from zcomm import Layout, Residuals, Segment, codec

STORAGES = [torch.float32, torch.bfloat16, torch.int8]


def fresh_residuals(layout: Layout, dtype: torch.dtype) -> list[Tensor]:
    sizes = [s.codec.residual_numel(s.numel, dtype) for s in layout.segments]
    return [torch.zeros(size, dtype=dtype) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_double_buffered_residuals_leave_their_inputs(kernels: str, dtype: torch.dtype) -> None:
    layout, grad = Layout(PARTS), gradient(450)
    tensors = fresh_residuals(layout, dtype)
    in_place = Residuals(layout, tensors)
    layout.encode(grad, in_place, kernels=kernels)
    before = [t.clone() for t in tensors]
    outputs = fresh_residuals(layout, dtype)
    wire = layout.encode(grad, Residuals(layout, tensors, outputs), kernels=kernels)
    assert all(map(torch.equal, tensors, before))
    assert torch.equal(layout.encode(grad, in_place, kernels=kernels), wire)
    assert all(map(torch.equal, tensors, outputs))


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_flat_residual_is_indexed_by_offset(kernels: str) -> None:
    layout, grad = Layout(PARTS), gradient(450)
    flat, tensors = torch.zeros(450), fresh_residuals(layout, torch.float32)
    held, apart = Residuals(layout, flat), Residuals(layout, tensors)
    for _ in range(2):
        wire = layout.encode(grad, held, kernels=kernels)
        assert torch.equal(wire, layout.encode(grad, apart, kernels=kernels))
    for segment, t in zip(PARTS, tensors):
        assert torch.equal(flat[segment.offset : segment.offset + segment.numel], t)
    assert not flat[7:10].any()


def table_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def test_address_tables() -> None:
    layout = Layout(PARTS)
    tensors, outputs = fresh_residuals(layout, torch.int8), fresh_residuals(layout, torch.int8)
    held = Residuals(layout, tensors, outputs)
    assert table_at(held.in_addresses, 5) == [t.data_ptr() for t in tensors]
    assert table_at(held.out_addresses, 5) == [t.data_ptr() for t in outputs]
    alone = Residuals(layout, tensors)
    assert alone.out_addresses == alone.in_addresses


def test_bad_residuals_are_refused() -> None:
    layout = Layout(PARTS)
    good = fresh_residuals(layout, torch.float32)
    memory = torch.zeros(600)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: Residuals(layout, good[:-1]), "expected 5 tensors, one per segment, got 4"),
        (
            lambda: Residuals(layout, [*good[:-1], good[-1].bfloat16()]),
            "residual 4: expected dtype",
        ),
        (lambda: Residuals(layout, [*good[:-1], torch.zeros(76)]), r"expected shape \(77,\)"),
        (lambda: Residuals(layout, torch.zeros(449)), "of 450 elements"),
        (lambda: Residuals(layout, torch.zeros(450, dtype=torch.int8)), "one tensor per segment"),
        (lambda: Residuals(layout, good, good[:2]), "outputs: expected 5 tensors"),
        (
            lambda: Residuals(layout, memory, memory[1:]),
            "segment 1 and that of segment 1 in separate memory",
        ),
        (lambda: Layout(PARTS, 4).encode(gradient(450), Residuals(layout, good)), "of this layout"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_bare_tensors_are_wrapped(kernels: str, storage: torch.dtype) -> None:
    layout, grad = Layout(PARTS), gradient(450)
    bare, tensors = fresh_residuals(layout, storage), fresh_residuals(layout, storage)
    held = Residuals(layout, tensors)
    for _ in range(2):
        wire = layout.encode(grad, bare, kernels=kernels)
        assert torch.equal(wire, layout.encode(grad, held, kernels=kernels))
        assert all(map(torch.equal, bare, tensors))
    if storage != torch.int8:
        flat = torch.zeros(450, dtype=storage)
        for _ in range(2):
            wire = layout.encode(grad, flat, kernels=kernels)
        fresh = Residuals(layout, fresh_residuals(layout, storage))
        layout.encode(grad, fresh, kernels=kernels)
        assert torch.equal(wire, layout.encode(grad, fresh, kernels=kernels))


COPIES: dict[str, Callable[[Residuals], Residuals]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda held: pickle.loads(pickle.dumps(held)),
}


def memory(held: Residuals) -> list[Tensor]:
    return [t.clone() for t in (*held.inputs, *held.outputs)]


@pytest.mark.parametrize("form", ["flat", "tensors", "buffered", "buffered flat"])
@pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_copy_has_memory_of_its_own(
    kernels: str, copy_of: Callable[[Residuals], Residuals], form: str
) -> None:
    layout, grad = Layout(PARTS), gradient(450)
    first: Tensor | list[Tensor] = torch.zeros(450)
    second: Tensor | list[Tensor] | None = torch.zeros(450) if form == "buffered flat" else None
    if "flat" not in form:
        first = fresh_residuals(layout, torch.bfloat16)
        second = fresh_residuals(layout, torch.bfloat16) if form == "buffered" else None
    held = Residuals(layout, first, second)
    layout.encode(grad, held, kernels=kernels)
    before = memory(held)
    other = copy_of(held)
    assert other.layout == layout
    assert all(map(torch.equal, memory(other), before))
    wire = layout.encode(grad, other, kernels=kernels)
    assert all(map(torch.equal, memory(held), before))
    assert torch.equal(layout.encode(grad, held, kernels=kernels), wire)
    assert all(map(torch.equal, memory(held), memory(other)))


def test_pickle_holds_a_flat_tensor_once() -> None:
    layout = Layout([Segment(codec("int8"), 1000, 1000 * i) for i in range(20)])
    assert len(pickle.dumps(Residuals(layout, torch.zeros(20_000)))) < 100_000


def test_shallow_copy_shares_the_tensors() -> None:
    held = Residuals(Layout(PARTS), torch.zeros(450))
    other = copy.copy(held)
    assert [t.data_ptr() for t in other.outputs] == [t.data_ptr() for t in held.outputs]


def test_residuals_of_an_equal_layout_are_accepted() -> None:
    held, other = Residuals(Layout(PARTS), torch.zeros(450)), Layout(PARTS)
    wire = other.encode(gradient(450), held)
    assert torch.equal(wire, other.encode(gradient(450)))


def test_repr_says_storage_and_bytes() -> None:
    layout = Layout(PARTS)
    assert repr(Residuals(layout, torch.zeros(450))) == (
        "<Residuals: 5 segments, torch.float32, 1736 bytes>"
    )
    halves = [fresh_residuals(layout, torch.bfloat16) for _ in range(2)]
    assert repr(Residuals(layout, *halves)) == (
        "<Residuals: 5 segments, torch.bfloat16, 1736 bytes>"
    )


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_layout_without_segments_takes_residuals(kernels: str) -> None:
    layout = Layout([], peers=2)
    for held in ([], torch.empty(0), Residuals(layout, [])):
        assert layout.encode(torch.empty(0), held, kernels=kernels).numel() == 64


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_gradient_that_overlaps_a_residual_is_refused(kernels: str) -> None:
    layout = Layout(PARTS)
    tensors, buffer = fresh_residuals(layout, torch.float32), torch.zeros(1000)
    tensors[0] = buffer[500:800]
    tensors[4] = buffer[900:977]
    held = Residuals(layout, tensors)
    for start in (51, 350, 449, 475, 500):
        with pytest.raises(ValueError, match="the gradient and the residuals in separate memory"):
            layout.encode(buffer[start : start + 450], held, kernels=kernels)
    assert not buffer.any()
    layout.encode(buffer[50:500], held, kernels=kernels)
    one = codec("int8")
    for residual in (buffer[:6], buffer[5:11]):
        with pytest.raises(ValueError, match="separate memory, got an overlap; use a clone"):
            one.encode(buffer[:6], residual, kernels=kernels)
    one.encode(buffer[:6], buffer[6:12], kernels=kernels)


def test_gradient_between_residuals_is_accepted() -> None:
    c, buffer = codec("int8"), torch.zeros(500)
    layout = Layout([Segment(c, 50, 50 * i) for i in range(4)])
    # Every run of 200 elements overlaps a residual.
    held = Residuals(layout, [buffer[at : at + 50] for at in (0, 50, 290, 450)])
    for start in range(301):
        with pytest.raises(ValueError, match="separate memory"):
            layout.encode(buffer[start : start + 200], held, kernels="reference")
    small = Layout([Segment(c, 10, 10 * i) for i in range(2)])
    apart = Residuals(small, [buffer[:10], buffer[100:110]])
    small.encode(buffer[10:30], apart)
    small.encode(buffer[80:100], apart)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_out_that_overlaps_is_refused(kernels: str) -> None:
    c, raw = codec("int8"), torch.zeros(256, dtype=torch.uint8)
    x = torch.arange(6.0)
    inside, outside = raw[:24].view(torch.float32), raw[64:88].view(torch.float32)
    with pytest.raises(ValueError, match="expected out and the gradient in separate memory"):
        c.encode(inside, out=raw[:64], kernels=kernels)
    with pytest.raises(ValueError, match="expected out and the residuals in separate memory"):
        c.encode(x, inside, out=raw[:64], kernels=kernels)
    outputs = Residuals(Layout([Segment(c, 6)]), [torch.zeros(6)], [inside])
    with pytest.raises(ValueError, match="expected out and the residuals in separate memory"):
        Layout([Segment(c, 6)]).encode(x, outputs, out=raw[:64], kernels=kernels)
    assert not raw.any()
    wire = c.encode(x, outside, out=raw[:64], kernels=kernels)
    other = wire.clone()
    with pytest.raises(ValueError, match="expected out and wire 1 in separate memory"):
        c.decode_sum([other, wire], 6, out=inside, kernels=kernels)
    c.decode_sum([other, wire], 6, out=outside, kernels=kernels)
