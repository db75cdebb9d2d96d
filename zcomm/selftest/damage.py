"""Damaged wires: every one must be refused and named."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zcomm.codecs import codec
from zcomm.codecs.layout import Layout, Segment
from zcomm.conformance.contract import Subject, difference, gradient
from zcomm.report.finding import Finding
from zcomm.selftest.tally import Scope, Tally
from zcomm.wire.header import HEADER_NBYTES, WireError, checksum

_REFERENCE = Subject("reference")
_NUMEL = 37
_KINDS = ["normal", "zeros of both signs", "ties", "NaN", "near the largest"]
# Wrong header fields under a correct checksum: where, and the wrong bytes.
_FIELDS = {
    "magic": (0, b"ZCOX"),
    "version": (4, b"\2\0"),
    "codec": (6, b"\xfe"),
    "flags": (7, b"\x81"),
    "elements": (8, b"\xff" * 8),
    "units": (16, b"\1\0\0\0"),
    "layout": (20, b"\xc5\x9d\x1c\x81"),
}


def check(scope: Scope) -> Finding:
    tally = Tally()
    for i, spec in enumerate(scope.specs):
        layout = Layout([Segment(codec(spec), _NUMEL)])
        grad = gradient(_NUMEL, _KINDS, torch.float32, patch=32, seed=i)
        good = layout.encode(grad, kernels="reference")
        with tally.guarded(spec, "an intact wire"):
            _decode(scope.subject, layout, [good])
        _check_flips(tally, scope, spec, layout, good)
        _check_fields(tally, scope, spec, layout, good)
        _check_bodies(tally, scope, spec, layout, good)
        for length in (0, HEADER_NBYTES, good.numel() - 1, good.numel() + 1):
            bad = torch.cat((good, good))[:length]
            _expect_refused(tally, scope, spec, layout, [bad], 0, f"{length} bytes")
    right = f"damaged wires of {len(scope.specs)} codecs refused, as by the reference"
    return tally.finding(right)


def with_checksum(wire: Tensor) -> Tensor:
    """A copy of a wire of one frame, with the checksum of its bytes."""
    wire = wire.clone()
    total = checksum(wire).to_bytes(8, "little")
    wire[HEADER_NBYTES - 8 : HEADER_NBYTES] = torch.tensor(list(total), dtype=torch.uint8)
    return wire


def _check_flips(tally: Tally, scope: Scope, spec: str, layout: Layout, good: Tensor) -> None:
    """Flips one bit of every byte."""
    for i in range(0, good.numel(), 3 if scope.quick else 1):
        bad = good.clone()
        bad[i] ^= 1 << (i * 5 % 8)
        _expect_refused(tally, scope, spec, layout, [bad], 0, f"a flipped bit in byte {i}")


def _check_fields(tally: Tally, scope: Scope, spec: str, layout: Layout, good: Tensor) -> None:
    for field, (at, value) in _FIELDS.items():
        bad = good.clone()
        bad[at : at + len(value)] = torch.tensor(list(value), dtype=torch.uint8)
        wires = [good, with_checksum(bad), good]
        _expect_refused(tally, scope, spec, layout, wires, 1, f"a wrong {field}")


def _check_bodies(tally: Tally, scope: Scope, spec: str, layout: Layout, good: Tensor) -> None:
    """Random bytes under a correct checksum: refused if the reference refuses them."""
    g = torch.Generator().manual_seed(len(spec))
    for i in range(6 if scope.quick else 30):
        bad = good.clone()
        at = torch.randint(HEADER_NBYTES, good.numel(), (1 + i % 4,), generator=g)
        bad[at] = torch.randint(256, (1 + i % 4,), generator=g, dtype=torch.uint8)
        wires = [good, with_checksum(bad)]
        what = f"random bytes at {sorted(at.tolist())}"
        try:
            expected = _decode(_REFERENCE, layout, wires)
        except WireError:
            _expect_refused(tally, scope, spec, layout, wires, 1, what)
            continue
        with tally.guarded(spec, what):
            tally.same(spec, what, _decode(scope.subject, layout, wires), expected)


def _expect_refused(
    tally: Tally,
    scope: Scope,
    spec: str,
    layout: Layout,
    wires: Sequence[Tensor],
    index: int,
    what: str,
) -> None:
    with tally.guarded(spec, what):
        try:
            _decode(scope.subject, layout, wires)
            tally.expect(spec, f"{what}: expected the wire to be refused, got its values")
        except WireError as error:
            named = error.wire_index == index
            told = f"{what}: expected wire {index} to be refused, got {error}"
            tally.expect(spec, "" if named else told)


def _decode(subject: Subject, layout: Layout, wires: Sequence[Tensor]) -> Tensor:
    """The sum. The wires must not change."""
    there = [wire.to(subject.device, copy=True) for wire in wires]
    total = layout.decode_sum(there, kernels=subject.kernels)
    for now, before in zip(there, wires):
        assert not difference(now.cpu(), before), "expected wires to stay unchanged"
    return total.cpu()
