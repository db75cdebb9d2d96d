"""The numerics contract on a device: wires, residuals and sums match the reference bit by bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product

import torch
from torch import Tensor

from zcomm.codecs import codec
from zcomm.codecs.layout import Layout, Residuals, Segment
from zcomm.conformance import contract
from zcomm.conformance.contract import GRAD_DTYPES, STORAGES, Case, Storage, Subject, gradient
from zcomm.report.finding import Finding
from zcomm.selftest.tally import Scope, Tally

_REFERENCE = Subject("reference")
_SUMMED = 1153
_MOST_WIRES = 9
_MANY_WIRES = 70  # more than fit in the arguments of the CUDA kernels
# Five tasks of 65,536 elements, and a short one whose last block is short.
_LARGE = 5 * 65536 + 1234 + 7
_MIXED = "mixed"


def check_contract(scope: Scope) -> Finding:
    """Every codec, gradient dtype, residual storage and case, and sums of 1 to 9 wires."""
    tally = Tally()
    cases = contract.CASES[1::4] if scope.quick else contract.CASES
    for spec in scope.specs:
        for dtype, storage, case in product(GRAD_DTYPES, STORAGES, cases):
            _check_case(tally, scope.subject, spec, dtype, storage, case)
        for n in (5, 129, _SUMMED)[2 * scope.quick :]:
            _check_sums(tally, scope.subject, spec, n, _wires(spec, n))
        many = (_unlike_wires(spec) * 8)[:_MANY_WIRES]
        _check_sums(tally, scope.subject, spec, _SUMMED, many)
    right = (
        f"{len(scope.specs)} codecs × {len(GRAD_DTYPES)} gradient dtypes × {len(STORAGES)} "
        f"residual storages × {len(cases)} cases, and sums of 1 to {_MOST_WIRES} and of "
        f"{_MANY_WIRES} wires: bit for bit"
    )
    return tally.finding(right)


def _check_case(
    tally: Tally, subject: Subject, spec: str, dtype: torch.dtype, storage: Storage, case: Case
) -> None:
    what = f"{dtype} gradient, {storage} residual, {case}"
    c = codec(spec)
    with tally.guarded(spec, what):
        expected = contract.reference(spec, dtype, storage, case)
        arguments = contract.inputs(spec, dtype, storage, case)
        got = subject.encode(c, *arguments, case.prescale, case.shift)
        tally.same(spec, f"wire, {what}", got.outcome.wire, expected.wire)
        tally.same(spec, f"residual, {what}", got.outcome.residual, expected.residual)
        # From the reference's wire: refusing a wrong wire of its own would say less.
        decoded = subject.decode(c, [expected.wire], case.n, case.shift)
        tally.same(spec, f"decoded, {what}", decoded.outcome.decoded, expected.decoded)
        for fault in got.broken + decoded.broken:
            tally.expect(spec, f"{fault}, {what}")


@cache
def _wires(spec: str, n: int) -> list[Tensor]:
    """Wires of all kinds of gradients."""
    cases = [Case(n, turn) for turn in (4, 0, 5, 1, 2, 9, 6, 7, 3)]
    return [contract.reference(spec, torch.float32, torch.float32, case).wire for case in cases]


@cache
def _unlike_wires(spec: str) -> list[Tensor]:
    """Normal numbers times powers of two: sums are rounded, so their order matters."""
    grads = [gradient(_SUMMED, ["normal"], torch.float32, seed=i) for i in range(_MOST_WIRES)]
    powers = (0, 9, 3, 14, 6, 17, 1, 11, 5)
    c = codec(spec)
    return [c.encode(grad * 2.0**p, kernels="reference") for grad, p in zip(grads, powers)]


def _check_sums(tally: Tally, subject: Subject, spec: str, n: int, wires: list[Tensor]) -> None:
    c = codec(spec)
    for count in {*range(1, _MOST_WIRES + 1), len(wires)}:
        what = f"sum of {count} wires of {n} elements"
        with tally.guarded(spec, what):
            expected = _REFERENCE.decode(c, wires[:count], n, 0).outcome.decoded
            got = subject.decode(c, wires[:count], n, count % 4)
            tally.same(spec, what, got.outcome.decoded, expected)
            for fault in got.broken:
                tally.expect(spec, f"{fault}, {what}")


def check_layouts(scope: Scope) -> Finding:
    """Segments of several tasks, and one layout of all codecs for three peers, some idle."""
    tally = Tally()
    n = _LARGE // 5 if scope.quick else _LARGE
    for i, spec in enumerate(scope.specs):
        layout = Layout([Segment(codec(spec), n)])
        for j, storage in enumerate(STORAGES[1:2] if scope.quick else STORAGES[1::2]):
            dtype = GRAD_DTYPES[(i + j) % len(GRAD_DTYPES)]
            _check_layout(tally, scope.subject, spec, layout, dtype, storage)
    layout = _mixed_layout(scope.specs)
    for dtype, storage in product(GRAD_DTYPES[:1] if scope.quick else GRAD_DTYPES, STORAGES):
        _check_layout(tally, scope.subject, _MIXED, layout, dtype, storage)
    right = (
        f"segments of {n:,} elements, and {len(layout.segments)} segments for {layout.peers} "
        "peers in one call, some idle: bit for bit"
    )
    return tally.finding(right)


def _mixed_layout(specs: tuple[str, ...]) -> Layout:
    """Segments of many sizes, with gaps, for one peer after another."""
    sizes = [0, 1, 3, 127, 129, 1000, 4096, 5003, 70001]
    segments, offset = [], 0
    for i, spec in enumerate(specs * 2):
        segments.append(Segment(codec(spec), sizes[i % len(sizes)], offset + i % 3, i % 3))
        offset += sizes[i % len(sizes)] + i % 3
    return Layout(segments, peers=3)


def _check_layout(
    tally: Tally, subject: Subject, spec: str, layout: Layout, dtype: torch.dtype, storage: Storage
) -> None:
    what = f"{len(layout.segments)} segments, {dtype} gradient, {storage} residual"
    kinds = list(contract.KINDS if spec == _MIXED else contract.FINITE_KINDS)
    grad = gradient(layout.span, kinds, dtype, patch=3000)
    for segment in layout.segments[1::4]:
        grad[segment.offset : segment.offset + segment.numel] = 0.0  # idle
    r = gradient(layout.span, list(contract.FINITE_KINDS), torch.float32, patch=3000, seed=1)
    stored = None
    if storage is not None:
        pieces = [(s.codec, r[s.offset : s.offset + s.numel]) for s in layout.segments]
        stored = [contract.stored_residual(codec(c.spec), piece, storage) for c, piece in pieces]
    with tally.guarded(spec, what):
        with _one_thread():
            expected = _encoded(_REFERENCE, layout, grad, stored)
            total = _decoded(_REFERENCE, layout, expected[0])
        got = _encoded(subject, layout, grad, stored)
        for name, one, other in zip(("wire", "residual"), got, expected):
            tally.same(spec, f"{name}, {what}", one, other)
        tally.same(spec, f"sum, {what}", _decoded(subject, layout, expected[0]), total)


@contextmanager
def _one_thread() -> Iterator[None]:
    """For the reference's many small operations: on a busy machine, threads would wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _encoded(
    subject: Subject, layout: Layout, grad: Tensor, stored: list[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """The wire, and the new residuals of all segments one after another."""
    device = subject.device
    new = [torch.zeros_like(t, device=device) for t in stored or []]
    held = Residuals(layout, [t.to(device) for t in stored], new) if stored else None
    wire = layout.encode(
        grad.to(device), held, prescale=1 / 3, keep_idle=True, kernels=subject.kernels
    )
    return wire.cpu(), torch.cat(new).cpu() if new else torch.empty(0)


def _decoded(subject: Subject, layout: Layout, wire: Tensor) -> Tensor:
    wires = [wire.to(subject.device)] * 3
    return layout.decode_sum(wires, kernels=subject.kernels).cpu()
