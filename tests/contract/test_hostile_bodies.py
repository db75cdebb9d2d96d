"""Wires with a valid header and checksum but a nonsense body."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from contract_data import NAMES, SPECS
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
from kernel_sets import CONTRACT_SETS
from zcomm import Codec, codec

every_kernel_set = pytest.mark.parametrize("kernels", CONTRACT_SETS)
BLOCKS = [spec for spec in SPECS if codec(spec).block]
RANGE = 65536
BODY = 32


def refuse_everywhere(spec: str, n: int, good: Tensor, at: int, new: bytes, kernels: str) -> None:
    """Replaces bytes of the body; tries it alone and second of two, with and without verifying."""
    layout = layout_of(spec, n)
    bad = changed(good, BODY + at, new)
    assert not torch.equal(bad, good)
    bad = with_checksums(layout, bad)
    assert_refused(layout, [bad], 0, kernels)
    assert_refused(layout, [good, bad, good], 1, kernels)
    assert_refused(layout, [good, bad], 1, kernels, verify=False)


def codes_start(c: Codec, n: int) -> int:
    return -(-2 * -(-n // c.block) // 16) * 16


def code_bytes(c: Codec, n: int) -> list[int]:
    """The positions of the code bytes in a segment of at most one block."""
    bits_used = c.format.code_count(n) * c.format.width  # type: ignore[attr-defined]
    start = codes_start(c, n)
    return list(range(start, start + -(-bits_used // 8)))


@every_kernel_set
@pytest.mark.parametrize("spec", BLOCKS)
def test_scale_that_does_not_occur(spec: str, kernels: str) -> None:
    c = codec(spec)
    n = 3 * c.block + 5
    good = good_wire(spec, n)
    scales = (
        0x0001,
        0x007F,
        0x8000,
        0x8080,
        0xBF80,
        0x7F80,
        0x7FC1,
        0x7FFF,
        0xFF80,
        0xFFC0,
        0xFFFF,
    )
    for scale in scales:
        for block in (0, 2, 3):
            new = scale.to_bytes(2, "little")
            refuse_everywhere(spec, n, good, 2 * block, new, kernels)


@every_kernel_set
@pytest.mark.parametrize("scale", [0x0000, 0x7FC0])
@pytest.mark.parametrize("spec", BLOCKS)
def test_code_in_a_zero_or_nan_block(spec: str, scale: int, kernels: str) -> None:
    """Every code bit of a short block; in a full block, those of the first and last bytes."""
    c = codec(spec)
    for n, places in ((5, code_bytes(c, 5)), (c.block, code_bytes(c, c.block)[:: c.block - 1])):
        good = good_wire(spec, n, kinds=["zeros of both signs" if scale == 0 else "NaN"])
        assert bytes(good[BODY : BODY + 2].tolist()) == scale.to_bytes(2, "little")
        for at in {*places, code_bytes(c, n)[-1]}:
            for bit in range(8):
                refuse_everywhere(spec, n, good, at, bytes([1 << bit]), kernels)


@every_kernel_set
@pytest.mark.parametrize(
    ("spec", "patterns"),
    [
        ("int8", [0x80]),
        ("int4", [0x08, 0x80, 0x88, 0x18, 0x8F]),
        ("fp8", [0x7F, 0xFF]),
        ("int8:block=256", [0x80]),
        ("int4:block=512", [0x83]),
    ],
)
def test_code_that_does_not_occur(spec: str, patterns: list[int], kernels: str) -> None:
    c = codec(spec)
    n = 2 * c.block + 38  # whole code bytes, and a short last block
    good = good_wire(spec, n)
    start, width = codes_start(c, n), c.format.width  # type: ignore[attr-defined]
    last = n * width // 8 - 1
    for at in (0, 1, 31, c.block * width // 8 - 1, c.block * width // 8, last - 1, last):
        for pattern in patterns:
            refuse_everywhere(spec, n, good, start + at, bytes([pattern]), kernels)


@every_kernel_set
@pytest.mark.parametrize("spec", [*NAMES, "topk:0.3"])
@pytest.mark.parametrize("n", [1, 3, 5, 131])
def test_padding_and_unused_bits(n: int, spec: str, kernels: str) -> None:
    """The format's unused bits, for every codec: the first of each section, then a sample."""
    c, good = codec(spec), good_wire(spec, n)
    free = unused_bits(c, n)
    assert not any(int(good[BODY + bit // 8]) >> bit % 8 & 1 for bit in free)
    for i, bit in enumerate(free):
        if i % 13 == 0 or bit == free[-1] or bit - 8 not in free:
            byte = int(good[BODY + bit // 8]) | 1 << bit % 8
            refuse_everywhere(spec, n, good, bit // 8, bytes([byte]), kernels)


def unused_bits(c: Codec, n: int) -> list[int]:
    """Computed from the format's table of sections: (bits used, bits in the section)."""
    plain = {"none": 32, "bf16": 16, "fp16": 16}
    if c.name in plain:
        used = [n * plain[c.name]]
    elif c.name == "topk":
        used = [32 * -(-n // RANGE), 16 * c.k(n), 16 * c.k(n)]
    else:
        width = c.format.width  # type: ignore[attr-defined]
        full, m = divmod(n, c.block)
        last = c.format.code_count(m) if m else 0  # type: ignore[attr-defined]
        used = [16 * -(-n // c.block), (full * c.block + last) * width]
    free, start = [], 0
    for bits in used:
        end = start + -(-bits // 128) * 128
        free += list(range(start + bits, end))
        start = end
    assert start == 8 * c.body_nbytes(n)
    return free


def word(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


# Three ranges (65536, 65536, 77) and k = 1312: the sections start at 0, 16 and 16 + 2624.
N, K = 2 * RANGE + 77, 1312
OFFSETS, VALUES = 16, 16 + 2 * K


def _count(wire: Tensor, r: int) -> int:
    return int(wire[BODY + 4 * r : BODY + 4 * r + 4].view(torch.int32))


TOPK: dict[str, Callable[[Tensor], tuple[int, bytes]]] = {
    "one too many": lambda w: (0, word(_count(w, 0) + 1, 4)),
    "one too few": lambda w: (4, word(_count(w, 1) - 1, 4)),
    "none at all": lambda w: (0, bytes(12)),
    "more than the short range holds": lambda w: (
        0, word(K - 78, 4) + word(0, 4) + word(78, 4)),
    "more than a range holds": lambda w: (0, word(RANGE + 1, 4)),
    "sum that wraps around": lambda w: (
        0, word(2**31, 4) + word(2**31, 4) + word(K, 4)),
    "negative": lambda w: (0, word(2**32 - 2, 4)),
    "negative, and the sum is right": lambda w: (
        0, word(K + 2, 4) + word(2**32 - 2, 4) + word(0, 4)),
    "first range flagged": lambda w: (0, b"\xff" * 4),
    "two ranges flagged": lambda w: (0, b"\xff" * 8),
    "last range flagged": lambda w: (8, b"\xff" * 4),
    "all flagged over entries": lambda w: (0, b"\xff" * 12),
    "equal offsets": lambda w: (
        OFFSETS + 2, bytes(w[BODY + OFFSETS : BODY + OFFSETS + 2].tolist())),
    "offsets exchanged": lambda w: (
        OFFSETS, bytes(w[BODY + OFFSETS :][[2, 3, 0, 1]].tolist())),
    "first offset high": lambda w: (OFFSETS, b"\xff\xff"),
    "offset behind the end": lambda w: (OFFSETS + 2 * K - 2, word(77, 2)),
    "offset far behind the end": lambda w: (OFFSETS + 2 * K - 2, b"\xff\xff"),
    "infinite value": lambda w: (VALUES, word(0x7F80, 2)),
    "negative infinite value": lambda w: (VALUES + 2 * 700, word(0xFF80, 2)),
    "NaN value": lambda w: (VALUES + 2 * K - 2, word(0x7FC0, 2)),
    "other NaN value": lambda w: (VALUES + 2 * K - 2, word(0xFF81, 2)),
}  # fmt: skip


@lru_cache(maxsize=1)
def three_ranges() -> Tensor:
    """A wire with elements from all three ranges."""
    x = torch.randn(N, generator=torch.Generator().manual_seed(0))
    x[2 * RANGE :] *= 10
    return codec("topk:0.01").encode(x, kernels="reference")


@every_kernel_set
@pytest.mark.parametrize("case", TOPK)
def test_topk_entries_that_make_no_sense(case: str, kernels: str) -> None:
    assert codec("topk:0.01").k(N) == K
    good = three_ranges()
    assert all(_count(good, r) > 1 for r in range(3))
    at, new = TOPK[case](good)
    refuse_everywhere("topk:0.01", N, good, at, new, kernels)


@every_kernel_set
def test_flagged_topk_segment_with_any_byte_after_the_counts(kernels: str) -> None:
    good = good_wire("topk:0.3", 37, kinds=["NaN"])
    assert codec("topk:0.3").decode(good, 37, kernels=kernels).isnan().all()
    for at in range(4, good.numel() - BODY):
        refuse_everywhere("topk:0.3", 37, good, at, b"\1", kernels)


@pytest.mark.parametrize("round_", range(3))
@pytest.mark.parametrize("spec", [*SPECS, MIXED])
def test_random_bodies_get_one_verdict(spec: str, round_: int) -> None:
    """All kernel sets refuse the wire, or all decode it to the same bits."""
    n = (37, 131, 1201)[round_]
    layout, good = layout_of(spec, n), good_wire(spec, n, kinds=KINDS)
    other = good_wire(spec, n, seed=round_)
    starts = [i for f in layout.frames for i in range(f.start + BODY, f.start + f.nbytes)]
    g = torch.Generator().manual_seed(round_)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=g))

    for i in range(60):
        bad = (good, other)[draw(2)].clone()
        for _ in range(1 + draw(3)):
            at = starts[draw(len(starts))]
            end = min(at + (1, 1, 2, 16)[draw(4)], starts[-1] + 1)
            if i % 4 == 0:
                bad[at:end] = other[at:end]
            elif i % 4 == 1:
                bad[at] ^= 1 << draw(8)
            else:
                bad[at:end] = (0, 0xFF, 0x7F, 0x80, draw(256))[draw(5)]
        bad = with_checksums(layout, bad)
        for wires in ([bad], [good, bad]):
            found = verdicts(layout, wires, bool(i % 2))
            assert all(verdict == found[0] for verdict in found), f"round {i}"
