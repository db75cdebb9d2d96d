"""Damaged wires: every one must be refused and named."""

from collections.abc import Sequence
from typing import NamedTuple

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
        wire = layout.encode(grad, kernels="reference")
        _Damage(tally, scope, spec, layout, wire).check()
    right = f"damaged wires of {len(scope.specs)} codecs refused, as by the reference"
    return tally.finding(right)


def with_checksum(wire: Tensor) -> Tensor:
    """A copy of a wire of one frame, with the checksum of its bytes."""
    wire = wire.clone()
    total = checksum(wire).to_bytes(8, "little")
    wire[HEADER_NBYTES - 8 : HEADER_NBYTES] = torch.tensor(list(total), dtype=torch.uint8)
    return wire


class _Damage(NamedTuple):
    """A good wire of a codec, damaged in many ways."""

    tally: Tally
    scope: Scope
    spec: str
    layout: Layout
    good: Tensor

    def check(self) -> None:
        with self.tally.guarded(self.spec, "an intact wire"):
            _decode(self.scope.subject, self.layout, [self.good])
        self._check_flips()
        self._check_fields()
        self._check_bodies()
        for length in (0, HEADER_NBYTES, self.good.numel() - 1, self.good.numel() + 1):
            bad = torch.cat((self.good, self.good))[:length]
            self._expect_refused([bad], 0, f"{length} bytes")

    def _check_flips(self) -> None:
        """Flips one bit of every byte."""
        for i in range(0, self.good.numel(), 3 if self.scope.quick else 1):
            bad = self.good.clone()
            bad[i] ^= 1 << (i * 5 % 8)
            self._expect_refused([bad], 0, f"a flipped bit in byte {i}")

    def _check_fields(self) -> None:
        for field, (at, value) in _FIELDS.items():
            bad = self.good.clone()
            bad[at : at + len(value)] = torch.tensor(list(value), dtype=torch.uint8)
            self._expect_refused([self.good, with_checksum(bad), self.good], 1, f"a wrong {field}")

    def _check_bodies(self) -> None:
        """Random bytes under a correct checksum: refused if the reference refuses them."""
        g = torch.Generator().manual_seed(len(self.spec))
        for i in range(6 if self.scope.quick else 30):
            bad = self.good.clone()
            at = torch.randint(HEADER_NBYTES, bad.numel(), (1 + i % 4,), generator=g)
            bad[at] = torch.randint(256, (1 + i % 4,), generator=g, dtype=torch.uint8)
            wires = [self.good, with_checksum(bad)]
            what = f"random bytes at {sorted(at.tolist())}"
            try:
                expected = _decode(_REFERENCE, self.layout, wires)
            except WireError:
                self._expect_refused(wires, 1, what)
                continue
            with self.tally.guarded(self.spec, what):
                got = _decode(self.scope.subject, self.layout, wires)
                self.tally.same(self.spec, what, got, expected)

    def _expect_refused(self, wires: Sequence[Tensor], index: int, what: str) -> None:
        with self.tally.guarded(self.spec, what):
            fault = f"{what}: expected the wire to be refused, got its values"
            try:
                _decode(self.scope.subject, self.layout, wires)
            except WireError as error:
                told = f"{what}: expected wire {index} to be refused, got {error}"
                fault = "" if error.wire_index == index else told
            self.tally.expect(self.spec, fault)


def _decode(subject: Subject, layout: Layout, wires: Sequence[Tensor]) -> Tensor:
    """The sum. The wires must not change."""
    there = [wire.to(subject.device, copy=True) for wire in wires]
    total = layout.decode_sum(there, kernels=subject.kernels)
    for now, before in zip(there, wires):
        assert not difference(now.cpu(), before), "expected wires to stay unchanged"
    return total.cpu()
