"""Layouts: segments in frames, and wires that decoders refuse."""

from __future__ import annotations

import copy
import pickle
import struct
from typing import Any

import pytest
import torch

from kernel_sets import KERNEL_SETS
from layout_data import PARTS, gradient
from zcomm import Layout, Segment, WireError, codec
from zcomm.wire.header import checksum, layout_hash


def test_frames_lie_one_after_another() -> None:
    layout = Layout(PARTS, peers=4)
    sizes = [s.codec.body_nbytes(s.numel) for s in PARTS]
    expected = (32 + sizes[1] + sizes[2], 32, 32 + sizes[0] + sizes[3] + sizes[4], 32)
    assert layout.frame_nbytes == expected
    assert layout.wire_nbytes == sum(expected)
    assert (layout.numel, layout.span, layout.peers) == (434, 450, 4)
    third = sum(expected[:2])
    assert layout.body_starts == (
        third + 32,
        32,
        32 + sizes[1],
        third + 32 + sizes[0],
        third + 32 + sizes[0],
    )


def test_peers_default_to_those_that_have_segments() -> None:
    assert Layout(PARTS).peers == 3
    assert Layout([]).frame_nbytes == (32,)
    with pytest.raises(ValueError, match="expected peers >= 3 for these segments, got 2"):
        Layout(PARTS, peers=2)


def test_layout_hash_is_fnv1a() -> None:
    assert layout_hash([]) == 0x811C9DC5
    value = 0x811C9DC5
    for byte in struct.pack("<BBQQ", 7, 7, 300, 0) + struct.pack("<BBQQ", 11, 0, 50, 5):
        value = (value ^ byte) * 0x01000193 % 2**32
    assert layout_hash([(7, 7, 300, 0), (11, 0, 50, 5)]) == value


def test_checksum_leaves_itself_out_and_wraps() -> None:
    words = [2**63 + 5, 2**64 - 1, 3, 77, 2**64 - 9, 12]
    frame = torch.frombuffer(bytearray(struct.pack("<6Q", *words)), dtype=torch.uint8)
    expected = sum(w * (2 * i + 1) for i, w in enumerate(words) if i != 3) % 2**64
    assert checksum(frame) == expected


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_header_fields(kernels: str, verify: bool) -> None:
    layout = Layout(PARTS, peers=4)
    wire = layout.encode(gradient(450), verify=verify, kernels=kernels)
    start = 0
    codecs, elements = (255, 0, 255, 0), (57, 0, 377, 0)
    for p, nbytes in enumerate(layout.frame_nbytes):
        frame = wire[start : start + nbytes].clone()
        fields = struct.unpack("<4sHBBQIIQ", bytes(frame[:32].tolist()))
        rows = [
            (s.codec.id, s.codec.log2_block, s.numel, s.codec.k(s.numel))
            for s in PARTS
            if s.peer == p
        ]
        total = checksum(frame) if verify else 0
        expected = (codecs[p], int(verify), elements[p], nbytes // 16, layout_hash(rows), total)
        assert fields == (b"ZCOM", 1, *expected)
        start += nbytes


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_segments_are_encoded_each_on_its_own(kernels: str) -> None:
    layout, grad = Layout(PARTS, peers=4), gradient(450)
    wire = layout.encode(grad, prescale=0.25, kernels=kernels)
    out = torch.full((460,), 9.0)
    assert layout.decode(wire, out=out, kernels=kernels) is out
    expected = torch.full((460,), 9.0)
    for segment, start in zip(PARTS, layout.body_starts):
        part = grad[segment.offset : segment.offset + segment.numel]
        alone = segment.codec.encode(part, prescale=0.25, kernels=kernels)
        assert torch.equal(wire[start : start + alone.numel() - 32], alone[32:])
        decoded = segment.codec.decode(alone, segment.numel, kernels=kernels)
        expected[segment.offset : segment.offset + segment.numel] = decoded
    assert torch.equal(out, expected)
    gaps = layout.decode(wire, kernels=kernels)
    assert gaps.shape == (450,)
    assert not gaps[7:10].any()


def test_equal_layouts() -> None:
    layout = Layout(PARTS)
    for same in (Layout(PARTS), Layout(PARTS, peers=3), copy.deepcopy(layout)):
        assert same == layout
        assert hash(same) == hash(layout)
    for other in (Layout(PARTS, peers=4), Layout(PARTS[1:]), Layout(PARTS[::-1]), PARTS):
        assert other != layout
    assert repr(layout) == f"<Layout: 5 segments, 3 peers, {layout.wire_nbytes} bytes>"


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_copies_of_a_layout_encode_the_same(kernels: str) -> None:
    layout, grad = Layout(PARTS, peers=4), gradient(450)
    wire = layout.encode(grad, kernels=kernels)
    for same in (pickle.loads(pickle.dumps(layout)), copy.copy(layout), copy.deepcopy(layout)):
        assert same.native is None
        assert torch.equal(same.encode(grad, kernels=kernels), wire)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((codec("lm4"), -1), "expected a segment's numel >= 0, got -1"),
        ((codec("lm4"), 1, -2), "expected a segment's offset >= 0, got -2"),
        ((codec("lm4"), 1, 0, -1), "expected a segment's peer >= 0, got -1"),
        ((codec("topk:0.1"), 2**63), r"expected a segment's numel < 2\^63, got"),
    ],
)
def test_bad_segment_is_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Segment(*arguments)  # type: ignore[arg-type]


def test_segment_needs_a_codec_object() -> None:
    with pytest.raises(TypeError, match=r"expected a Codec, got 'lm4'; use zcomm\.codec"):
        Segment("lm4", 5)  # type: ignore[arg-type]


def test_overlapping_segments_are_refused() -> None:
    c = codec("none")
    Layout([Segment(c, 5, 5), Segment(c, 0, 3), Segment(c, 5, 0)])
    with pytest.raises(ValueError, match="one at offset 4 where another ends at 5"):
        Layout([Segment(c, 5, 4), Segment(c, 5, 0)])


def test_gradient_shorter_than_the_span_is_refused() -> None:
    layout = Layout(PARTS)
    with pytest.raises(ValueError, match="gradient: expected 450 elements, got 449"):
        layout.encode(gradient(449), kernels="reference")
    with pytest.raises(ValueError, match="expected a contiguous 1-D tensor"):
        layout.encode(gradient(450).view(2, 225), kernels="reference")


@pytest.mark.parametrize(
    ("at", "replacement", "message"),
    [
        (0, b"X", "magic"),
        (4, b"\2", "version 1, got 2"),
        (6, b"\4", "codec lm4, got int8"),
        (7, b"\3", "flags"),
        (7, b"\0", "checksum"),
        (8, b"\7", "elements 130, got 7"),
        (16, b"\1", "frame bytes 128, got 16"),
        (20, b"\1\2\3", "layout"),
        (24, b"\1\2\3", "checksum"),
        (70, b"\xff\xff", "checksum"),
    ],
)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_changed_bytes_are_refused(kernels: str, at: int, replacement: bytes, message: str) -> None:
    c = codec("lm4")
    good = c.encode(gradient(130), kernels=kernels)
    bad = good.clone()
    bad[at : at + len(replacement)] = torch.tensor(list(replacement), dtype=torch.uint8)
    assert not torch.equal(good, bad)
    with pytest.raises(WireError, match=f"^wire 2: expected .*{message}") as caught:
        c.decode_sum([good, good, bad, good], 130, kernels=kernels)
    assert caught.value.wire_index == 2
    assert "got" in str(caught.value)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_frame_without_checksum_needs_verify_off(kernels: str) -> None:
    c = codec("lm4")
    plain = c.encode(gradient(130), verify=False, kernels=kernels)
    with pytest.raises(WireError, match="checksum"):
        c.decode(plain, 130, kernels=kernels)
    decoded = c.decode(plain, 130, verify=False, kernels=kernels)
    summed = c.encode(gradient(130), kernels=kernels)
    assert torch.equal(decoded, c.decode(summed, 130, verify=False, kernels=kernels))
    plain[24] = 1
    with pytest.raises(WireError, match="checksum"):
        c.decode(plain, 130, verify=False, kernels=kernels)


# Spec, n, and the changed bytes in the body of gradient(n).
MALFORMED = {
    "subnormal scale": ("int8", 130, {0: 0x7F, 1: 0x00}),
    "negative scale": ("lm4", 130, {1: 0x80}),
    "infinite scale": ("sign", 130, {0: 0x80, 1: 0x7F}),
    "other NaN scale": ("fp8", 130, {0: 0xC1, 1: 0x7F}),
    "code in a zero block": ("lm3", 130, {0: 0, 1: 0}),
    "code in a NaN block": ("int4", 130, {0: 0xC0, 1: 0x7F}),
    "int8 -128": ("int8", 130, {16 + 129: 0x80}),
    "int4 -8": ("int4", 130, {16 + 3: 0x81}),
    "fp8 0x7f": ("fp8", 130, {16: 0x7F}),
    "fp8 0xff": ("fp8", 130, {16: 0xFF}),
    "padding after scales": ("int8", 130, {15: 1}),
    "padding after codes": ("int8", 130, {16 + 130: 1}),
    "padding after values": ("bf16", 5, {15: 1}),
    "unused bits int4": ("int4", 1, {16: 0x10}),
    "unused bits lm3": ("lm3", 1, {16: 0x08}),
    "unused bits sign": ("sign", 9, {17: 0x02}),
    "topk counts add up to less": ("topk:0.1", 50, {0: 4}),
    "topk count beyond its range": ("topk:0.1", 50, {0: 51}),
    "topk count of many": ("topk:0.1", 50, {3: 0x80}),
    "topk offset outside": ("topk:0.1", 50, {16 + 8: 50}),
    "topk offset far outside": ("topk:0.1", 50, {16 + 9: 0xFF}),
    "topk offsets equal": ("topk:1", 50, {16 + 2: 0}),
    "topk offsets decrease": ("topk:1", 50, {16 + 4: 0}),
    "topk infinite value": ("topk:0.1", 50, {32: 0x80, 33: 0xFF}),
    "topk padding after counts": ("topk:0.1", 50, {4: 1}),
    "topk padding after offsets": ("topk:0.1", 50, {16 + 10: 1}),
    "topk padding after values": ("topk:0.1", 50, {47: 1}),
    "topk flagged with offsets": ("topk:0.1", 50, {0: 255, 1: 255, 2: 255, 3: 255}),
}


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_malformed_body_is_refused_without_a_checksum_too(kernels: str, case: str) -> None:
    spec, n, changes = MALFORMED[case]
    c = codec(spec)
    good = c.encode(gradient(n), verify=False, kernels=kernels)
    if case.startswith("unused bits"):
        good[48:] = 0
        good[32:48] = torch.tensor([0x80, 0x3F] + [0] * 14, dtype=torch.uint8)
    c.decode(good, n, verify=False, kernels=kernels)
    bad = good.clone()
    for at, value in changes.items():
        bad[32 + at] = value
    with pytest.raises(WireError, match=r"^wire 1, segment 0 .*: expected .* got") as caught:
        c.decode_sum([good, bad], n, verify=False, kernels=kernels)
    assert caught.value.wire_index == 1


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_wires_at_odd_addresses(kernels: str) -> None:
    layout, grad = Layout(PARTS), gradient(450)
    wire = layout.encode(grad, kernels=kernels)
    memory = torch.zeros(layout.wire_nbytes + 3, dtype=torch.uint8)
    out = layout.encode(grad, out=memory[3:], kernels=kernels)
    assert torch.equal(out, wire)
    assert torch.equal(layout.decode(out, kernels=kernels), layout.decode(wire, kernels=kernels))


@pytest.mark.parametrize(
    ("faults", "error", "message"),
    [
        ("x", TypeError, "faults: expected a tensor, got .x."),
        (torch.tensor([-1.0]), ValueError, "faults: expected torch.int64, got torch.float32"),
        (torch.full((3,), -1), ValueError, r"faults: expected 1 element, got 3; use faults\[i"),
        (torch.full((0,), -1), ValueError, "faults: expected 1 elements, got 0"),
        (torch.full((1,), -1, device="meta"), ValueError, "faults: expected a tensor that holds"),
    ],
)
def test_where_faults_go_is_checked(faults: Any, error: type[Exception], message: str) -> None:
    layout = Layout([Segment(codec("int8"), 300)])
    wire = layout.encode(torch.ones(300))
    with pytest.raises(error, match=message):
        layout.decode(wire, faults=faults)
    layout.decode(wire, faults=torch.full((1,), -1))
