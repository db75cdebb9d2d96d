"""Damaged wires: flipped, cut, extended, misdirected. Never a crash, always an error.

test_hostile_bodies.py covers damage with a valid checksum.
"""

from __future__ import annotations

import pickle

import pytest
import torch

from contract_data import SPECS
from hostile import (
    KINDS,
    MIXED,
    assert_refused,
    changed,
    good_wire,
    layout_of,
    verdicts,
    with_checksums,
)
from kernel_sets import CONTRACT_SETS, EMULATED
from zcomm import WireError, codec

every_kernel_set = pytest.mark.parametrize("kernels", CONTRACT_SETS)
every_codec = pytest.mark.parametrize("spec", [*SPECS, MIXED])


@every_kernel_set
@every_codec
def test_every_flipped_bit_is_refused(spec: str, kernels: str) -> None:
    layout, good = layout_of(spec, 5), good_wire(spec, 5)
    layout.decode(good, kernels=kernels)
    for bit in range(8 * good.numel()):
        bad = good.clone()
        bad[bit // 8] ^= 1 << (bit % 8)
        assert_refused(layout, [bad], 0, kernels)


@every_kernel_set
@every_codec
def test_every_flipped_header_bit_is_refused_without_verifying(spec: str, kernels: str) -> None:
    """Except the checksum's bits, which are not read in that case."""
    layout, good = layout_of(spec, 5), good_wire(spec, 5)
    for bit in range(8 * 24):
        bad = good.clone()
        bad[bit // 8] ^= 1 << (bit % 8)
        assert_refused(layout, [bad], 0, kernels, verify=False)


@every_kernel_set
@every_codec
def test_truncated_and_extended_wires(spec: str, kernels: str) -> None:
    layout, good = layout_of(spec, 37), good_wire(spec, 37)
    nbytes = good.numel()
    for length in range(nbytes):
        assert_refused(layout, [good[:length]], 0, kernels, match=f"{nbytes} bytes, got {length}$")
    for extra in (1, 8, 16, 1000, nbytes):
        longer = torch.cat((good, torch.zeros(extra, dtype=torch.uint8)))
        assert_refused(layout, [good, longer], 1, kernels, match=f"got {nbytes + extra}$")
        assert_refused(layout, [torch.cat((good, good.repeat(9)[:extra]))], 0, kernels)


FIELDS = {
    "magic": (0, [b"ZCOX", b"\0\0\0\0", b"MOCZ"]),
    "version": (4, [b"\0\0", b"\2\0", b"\0\1", b"\xff\xff"]),
    "codec": (6, [b"\0", b"\x0c", b"\xfe", b"\xff"]),
    "flags": (7, [b"\0", b"\2", b"\3", b"\x80", b"\x81", b"\xff"]),
    "elements": (8, [v.to_bytes(8, "little") for v in (0, 36, 38, 2**31, 2**32 + 37, 2**63)]),
    "most elements": (8, [b"\xff" * 8, b"\0" * 7 + b"\x80", b"\xff" * 7 + b"\x7f"]),
    "units": (16, [v.to_bytes(4, "little") for v in (0, 1, 2**28, 2**31, 2**32 - 1)]),
    "layout": (20, [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\xc5\x9d\x1c\x81"]),
}


@every_kernel_set
@pytest.mark.parametrize("field", FIELDS)
@every_codec
def test_wrong_header_field_under_a_right_checksum(spec: str, field: str, kernels: str) -> None:
    at, replacements = FIELDS[field]
    layout, good = layout_of(spec, 37), good_wire(spec, 37)
    for frame in layout.frames:
        for replacement in replacements:
            bad = changed(good, frame.start + at, replacement)
            if torch.equal(bad, good):
                continue
            bad = with_checksums(layout, bad)
            assert_refused(layout, [good, bad, good], 1, kernels)
            if frame.start == 0 and field in ("elements", "units", "version"):
                # Devices report only the field.
                numbers = (
                    "expected the layout's" if kernels in EMULATED else r"expected .*\d.* got .*\d"
                )
                assert_refused(layout, [bad], 0, kernels, match=numbers)


@every_kernel_set
@pytest.mark.parametrize(
    ("sent", "expected", "n", "other"),
    [
        ("int8", "fp8", 37, 37),
        ("bf16", "fp16", 37, 37),
        ("int4", "lm4", 64, 64),
        ("lm4:block=32", "lm4:block=64", 32, 32),
        ("int8", "int8", 37, 38),
        ("sign", "sign", 1, 128),
        ("topk:0.01", "topk:0.02", 50, 50),
        ("topk:0.01", "topk:0.01", 50, 51),
        ("none", "none", 1, 4),
    ],
)
def test_wire_of_another_layout_with_the_same_length(
    sent: str, expected: str, n: int, other: int, kernels: str
) -> None:
    wire = codec(sent).encode(torch.randn(n), kernels=kernels)
    layout = layout_of(expected, other)
    if sent.startswith("topk") and sent != expected:
        assert codec(sent).k(n) == codec(expected).k(other), "the same numbers mean the same wire"
        layout.decode(wire, kernels=kernels)
        return
    assert wire.numel() == layout.wire_nbytes
    assert_refused(layout, [wire], 0, kernels)
    assert_refused(layout, [wire], 0, kernels, verify=False)


@every_kernel_set
@every_codec
def test_refused_wire_is_named_among_several(spec: str, kernels: str) -> None:
    """One damaged body among good wires, and the first of two damaged ones."""
    layout, good = layout_of(spec, 37), good_wire(spec, 37)
    bad = changed(good, good.numel() - 1, bytes([int(good[-1]) ^ 0x80]))
    for count in (2, 3, 5, 9):
        for index in range(count):
            wires = [good] * count
            wires[index] = bad
            assert_refused(layout, wires, index, kernels)
            wires[-1] = bad
            assert_refused(layout, wires, index, kernels)


@every_codec
def test_frames_exchanged_or_repeated(spec: str) -> None:
    """Pieces of good wires in the wrong place."""
    layout, n = layout_of(spec, 131), 131
    first, second = good_wire(spec, n), good_wire(spec, n, seed=1, kinds=KINDS)
    for cut in range(16, first.numel(), 16):
        spliced = torch.cat((first[:cut], second[cut:]))
        if not torch.equal(spliced, first) and not torch.equal(spliced, second):
            found = verdicts(layout, [first, spliced], True)
            frames = [torch.equal(spliced[f.start :][: f.nbytes], second[f.start :][: f.nbytes])
                      or torch.equal(spliced[f.start :][: f.nbytes], first[f.start :][: f.nbytes])
                      for f in layout.frames]  # fmt: skip
            if not all(frames):
                assert found == ["wire 1"] * len(found)
            else:
                assert all(verdict == found[0] for verdict in found)


@every_codec
def test_random_mutations_are_refused(spec: str) -> None:
    layout, good = layout_of(spec, 131), good_wire(spec, 131, kinds=KINDS)
    g = torch.Generator().manual_seed(len(spec))
    for _ in range(60):
        bad = good.clone()
        count = int(torch.randint(1, 9, (1,), generator=g))
        at = torch.randint(good.numel(), (count,), generator=g)
        bad[at] = torch.randint(256, (count,), generator=g, dtype=torch.uint8)
        if not torch.equal(bad, good):
            found = verdicts(layout, [good, bad], True)
            assert found == ["wire 1"] * len(found)


@pytest.mark.parametrize("kernels", CONTRACT_SETS)
def test_nonsense_of_the_right_length(kernels: str) -> None:
    layout = layout_of(MIXED, 37)
    g = torch.Generator().manual_seed(1)
    for value in (0, 0xFF, None):
        wire = torch.randint(256, (layout.wire_nbytes,), generator=g, dtype=torch.uint8)
        if value is not None:
            wire.fill_(value)
        assert_refused(layout, [wire], 0, kernels)
        assert_refused(layout, [with_checksums(layout, wire)], 0, kernels, verify=False)


@every_kernel_set
def test_the_error_carries_its_place(kernels: str) -> None:
    """The refused frame of a header or checksum, or the refused segment of a body."""
    layout, good = layout_of(MIXED, 37), good_wire(MIXED, 37)
    second = layout.frames[1].start
    int4 = layout.body_starts[3]
    damaged = {
        (1, None): [changed(good, second, b"Z!"), changed(good, second + 24, b"\x7f\x7f")],
        (None, 3): [with_checksums(layout, changed(good, int4, b"\x01\x00"))],
    }
    for place, wires in damaged.items():
        for bad in wires:
            with pytest.raises(WireError) as caught:
                layout.decode_sum([good, bad], kernels=kernels)
            for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
                assert error.wire_index == 1
                assert (error.frame, error.segment) == place, str(error)
