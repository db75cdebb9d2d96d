"""Damaged wires, and what is asked of every decoder that gets one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from contract_data import bits, gradient
from kernel_sets import EMULATED, KERNEL_SETS
from zcomm import Layout, Segment, WireError, codec
from zcomm.selftest.damage import with_checksum

MIXED = "mixed"
KINDS = ["normal", "zeros of both signs", "ties", "NaN", "near the largest"]


def layout_of(spec: str, n: int) -> Layout:
    """One segment; for "mixed" several codecs in one frame, and a second frame."""
    if spec != MIXED:
        return Layout([Segment(codec(spec), n)])
    specs = [("none", 0), ("topk:0.3", 0), ("lm3", 0), ("int4", 1), ("sign", 1)]
    return Layout([Segment(codec(s), n, i * n, peer) for i, (s, peer) in enumerate(specs)])


def good_wire(spec: str, n: int, *, kinds: Sequence[str] = ("normal",), seed: int = 0) -> Tensor:
    layout = layout_of(spec, n)
    grad = gradient(layout.span, kinds, torch.float32, patch=32, seed=seed)
    return layout.encode(grad, kernels="reference")


def with_checksums(layout: Layout, wire: Tensor) -> Tensor:
    """A copy whose frames have right checksums."""
    return torch.cat([with_checksum(frame) for frame in wire.split(list(layout.frame_nbytes))])


def changed(wire: Tensor, at: int, replacement: bytes) -> Tensor:
    wire = wire.clone()
    wire[at : at + len(replacement)] = torch.tensor(list(replacement), dtype=torch.uint8)
    return wire


def assert_refused(
    layout: Layout,
    wires: Sequence[Tensor],
    index: int,
    kernels: str,
    *,
    verify: bool = True,
    match: str | None = None,
) -> None:
    """A WireError that names the wire and says what was expected and what was found."""
    with pytest.raises(WireError, match=match) as caught:
        layout.decode_sum(wires, kernels=kernels, verify=verify)
    message = str(caught.value)
    assert caught.value.wire_index == index, message
    assert "expected" in message, message
    assert "got" in message, message
    assert f"wire {index}" in message, message


def verdicts(layout: Layout, wires: Sequence[Tensor], verify: bool) -> list[object]:
    """What every kernel set makes of wires: the refused one's index, or the sum's patterns."""
    found: list[object] = []
    for kernels in (*KERNEL_SETS, *EMULATED):
        try:
            total = layout.decode_sum(wires, kernels=kernels, verify=verify)
            found.append(bits(total).tolist())
        except WireError as error:
            clear = "expected" in str(error) and "got" in str(error)
            found.append(f"wire {error.wire_index}" if clear else str(error))
    return found
