"""Refused arguments: messages say what was expected and what was passed; nothing is written."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernel_sets import KERNEL_SETS
from zcomm import Layout, Residuals, Segment, WireError, codec

X = torch.arange(6.0)
WRONG_ENCODE = {
    "dtype": (
        X.double(),
        None,
        "expected torch.float32, torch.bfloat16 or torch.float16, got torch.float64; use x.float",
    ),
    "stride": (torch.arange(12.0)[::2], None, "contiguous"),
    "transposed": (torch.ones(2, 3).t(), None, "contiguous"),
    "residual length": (X, torch.zeros(5), r"expected shape \(6,\) .* got \(5,\)"),
    "residual dtype": (X, torch.zeros(6, dtype=torch.float16), "got torch.float16"),
    "residual stride": (X, torch.zeros(12)[::2], "contiguous"),
    "residual device": (X, torch.zeros(6, device="meta"), "holds data, got Tensor on meta"),
}


@pytest.mark.parametrize("case", WRONG_ENCODE)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_encode_refuses_wrong_tensors(kernels: str, case: str) -> None:
    x, residual, message = WRONG_ENCODE[case]
    with pytest.raises(ValueError, match=message):
        codec("int8").encode(x, residual, kernels=kernels)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(47, dtype=torch.uint8), "expected out of 64 bytes, got 47"),
        (torch.zeros(64), "expected torch.uint8, got torch.float32"),
        (torch.zeros(128, dtype=torch.uint8)[::2], "contiguous"),
        (torch.zeros(64, dtype=torch.uint8, device="meta"), "holds data, got Tensor on meta"),
    ],
)
def test_encode_refuses_wrong_out(out: torch.Tensor, message: str) -> None:
    residual = torch.ones(6)
    with pytest.raises(ValueError, match=message):
        codec("int8").encode(X, residual, out=out, kernels="reference")
    assert torch.equal(residual, torch.ones(6))


@pytest.mark.parametrize("prescale", ["1", True, torch.ones(1), None])
def test_prescale_must_be_a_number(prescale: Any) -> None:
    with pytest.raises(TypeError, match="expected prescale as a float, got"):
        codec("int8").encode(X, prescale=prescale, kernels="reference")


@pytest.mark.parametrize("prescale", [float("nan"), float("inf"), 1e39])
def test_prescale_must_be_finite_in_fp32(prescale: float) -> None:
    with pytest.raises(ValueError, match="expected a prescale that is finite"):
        codec("int8").encode(X, prescale=prescale, kernels="reference")


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_wires_of_wrong_form_are_refused(kernels: str) -> None:
    c = codec("int8")
    wire = c.encode(X, kernels=kernels)
    with pytest.raises(WireError, match="wire 1: expected 64 bytes, got 63") as caught:
        c.decode_sum([wire, wire[:-1]], 6, kernels=kernels)
    assert caught.value.wire_index == 1
    for wires, message in (
        ([], "at least 1 wire, got 0"),
        (wire, "list of wires or a 2-D tensor"),
        ([wire.view(torch.int8)], "wire 0: expected torch.uint8, got torch.int8"),
        ([wire, wire.to("meta")], "wire 1: .* holds data, got Tensor on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            c.decode_sum(wires, 6, kernels=kernels)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_decode_refuses_wrong_out(kernels: str) -> None:
    c = codec("int8")
    wire = c.encode(X, kernels=kernels)
    for out, message in (
        (torch.empty(5), "expected out of 6 elements, got 5"),
        (torch.empty(6, dtype=torch.bfloat16), "out: expected torch.float32, got torch.bfloat16"),
        (torch.empty(12)[::2], "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            c.decode(wire, 6, out=out, kernels=kernels)


C = codec("int8")
WIRE = C.encode(X, kernels="reference")
LAYOUT = Layout([Segment(C, 6)])
# Each call, with the parts of its message: what was expected, and what it got.
NOT_TENSORS: dict[str, tuple[Callable[[Any], object], str]] = {
    "list": (lambda c: c.encode([1.0, 2.0]), "gradient: expected a tensor, got list"),
    "None": (lambda c: c.encode(None), "gradient: expected a tensor, got None"),
    "residual": (lambda c: c.encode(X, True), "residual: expected a tensor, got True"),
    "encode out": (lambda c: c.encode(X, out=bytearray(64)), "out: expected a tensor, got bytea"),
    "bytes": (lambda c: c.decode(bytes(64), 6), r"wire 0: .* got bytes; use torch.frombuffer"),
    "wires of bytes": (lambda c: c.decode_sum(bytes(64), 6), "expected a list of .* got bytes"),
    "generator": (
        lambda c: c.decode_sum((w for w in [WIRE]), 6),
        r"expected a list of wires or a 2-D tensor, got generator; use list\(wires\)",
    ),
    "no wires": (lambda c: c.decode_sum(None, 6), "expected a list of wires .* got None"),
    "decode out": (lambda c: c.decode(WIRE, 6, out=[0.0] * 6), "out: expected a tensor, got list"),
    "flat gradient": (lambda _: LAYOUT.encode([1.0]), "gradient: expected a tensor, got list"),
    "residuals": (lambda _: LAYOUT.encode(X, True), "expected a list of tensors or a flat .* True"),
    "residual list": (lambda _: LAYOUT.encode(X, [1]), "residuals: expected a tensor, got 1"),
    "residual generator": (lambda _: Residuals(LAYOUT, iter([X])), "got list_iterator"),  # type: ignore[arg-type]
    "residuals of a codec": (lambda c: Residuals(c, [X]), "expected a Layout, got Codec"),
    "frame": (lambda _: LAYOUT.frame(bytes(64), 0), "wire: expected a tensor, got bytes"),
    "segment": (lambda _: Layout(Segment(C, 6)), r"got Segment; use \[segment\]"),  # type: ignore[arg-type]
    "segments": (lambda _: Layout([C]), "expected a Segment at 0, got Codec"),  # type: ignore[list-item]
    "peers": (lambda _: Layout([], peers=2.0), "expected peers as an int, got 2.0"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", NOT_TENSORS)
def test_other_objects_are_refused(case: str) -> None:
    call, message = NOT_TENSORS[case]
    with pytest.raises(TypeError, match=message):
        call(C)


NOT_INTS = [
    1000.0,
    6.0,
    True,
    torch.Size([2, 3]),
    (6,),
    "6",
    None,
    torch.ones(6),
    torch.tensor(6.0),
]


@pytest.mark.parametrize("n", NOT_INTS, ids=repr)
def test_count_that_is_no_int_is_refused_whatever_came_before(n: Any) -> None:
    calls: list[Callable[[Any], object]] = [
        lambda n: C.decode(WIRE, n, kernels="reference"),
        lambda n: C.decode_sum([WIRE], n, kernels="reference"),
        C.wire_nbytes,
        C.k,
        C.new_residual,
        lambda n: Segment(C, n),
    ]
    for call in calls:
        call(6)
        with pytest.raises(TypeError, match=r"as an int, got .*; use x\.numel\(\)"):
            call(n)


@pytest.mark.parametrize("make", [int, torch.tensor], ids=["int", "tensor"])
def test_integers_of_other_types_are_counts(make: Callable[[int], Any]) -> None:
    assert torch.equal(
        C.decode(WIRE, make(6), kernels="reference"), C.decode(WIRE, 6, kernels="reference")
    )
    assert type(Segment(C, make(6)).numel) is int


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("threads", [0, -1, 2.0, True, "2", 1025, 10**6])
def test_threads_must_be_an_int_from_1_to_1024(kernels: str, threads: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: C.encode(X, kernels=kernels, threads=threads),
        lambda: C.decode(WIRE, 6, kernels=kernels, threads=threads),
        lambda: LAYOUT.decode_sum([WIRE], kernels=kernels, threads=threads),
    ]
    for call in calls:
        with pytest.raises(
            (TypeError, ValueError), match=r"expected threads (>= 1|<= 1024|as an int), got"
        ):
            call()


def sparse(kind: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that CSR is in beta
        return torch.eye(3).to_sparse() if kind == "coo" else torch.eye(3).to_sparse_csr()


@pytest.mark.parametrize("kernels", [None, *KERNEL_SETS])
def test_gradients_of_other_kinds_are_refused(kernels: str | None) -> None:
    cases = [
        (sparse("coo"), r"sparse gradients are not supported, use \.to_dense"),
        (torch.ones(3).to_sparse(), r"sparse gradients are not supported, use \.to_dense"),
        (sparse("csr"), r"got torch.sparse_csr; .* use \.to_dense"),
        (torch.ones(3, dtype=torch.complex64), "got torch.complex64; complex tensors are not"),
        (torch.ones(3, dtype=torch.int64), r"got torch.int64; use x\.float\(\)"),
        (torch.ones(3, device="meta"), "holds data, got Tensor on meta"),
        (torch.ones(0, device="meta"), "meta"),
    ]
    for x, message in cases:
        with pytest.raises(ValueError, match=message):
            C.encode(x, kernels=kernels)


def test_wires_of_other_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"wire 0: .* holds data, got Tensor on meta"):
        C.decode(WIRE.to("meta"), 6)
    with pytest.raises(ValueError, match="wire 0: expected a dense tensor"):
        C.decode(WIRE.to_sparse(), 6)
    with pytest.raises(ValueError, match="wires: expected a dense tensor"):
        C.decode_sum(WIRE.view(1, -1).to_sparse(), 6)
