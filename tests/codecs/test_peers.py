"""A frame for each peer, and the layout with which its receiver decodes it."""

from __future__ import annotations

import pytest
import torch

from kernel_sets import KERNEL_SETS
from layout_data import PARTS, gradient
from zcomm import Layout, Segment, WireError, codec


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_a_peers_frame_is_the_wire_of_its_own_layout(kernels: str) -> None:
    layout, grad = Layout(PARTS, peers=4), gradient(450)
    frames = layout.encode(grad, kernels=kernels).split(list(layout.frame_nbytes))
    for peer, frame in enumerate(frames):
        own = Layout([Segment(s.codec, s.numel, s.offset) for s in PARTS if s.peer == peer])
        assert torch.equal(own.encode(grad, kernels=kernels), frame)


def test_for_peer_packs_the_peers_segments() -> None:
    layout = Layout(PARTS, peers=4)
    assert layout.for_peer(2) == Layout(
        [
            Segment(codec("lm4"), 300),
            Segment(codec("int8"), 0, offset=300),
            Segment(codec("int8:block=32"), 77, offset=300),
        ]
    )
    assert layout.for_peer(3) == Layout([])
    assert [layout.for_peer(p).wire_nbytes for p in range(4)] == list(layout.frame_nbytes)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_frame_is_a_view_that_its_peer_decodes(kernels: str) -> None:
    layout, grad = Layout(PARTS, peers=4), gradient(450)
    wire = layout.encode(grad, kernels=kernels)
    whole = layout.decode(wire, kernels=kernels)
    start = 0
    for peer, nbytes in enumerate(layout.frame_nbytes):
        frame = layout.frame(wire, peer)
        assert (frame.data_ptr(), frame.numel()) == (wire.data_ptr() + start, nbytes)
        decoded = layout.for_peer(peer).decode(frame, kernels=kernels)
        own = [whole[s.offset : s.offset + s.numel] for s in PARTS if s.peer == peer]
        assert torch.equal(decoded, torch.cat([torch.empty(0), *own]))
        start += nbytes


def test_peers_that_are_not_there_are_refused() -> None:
    layout = Layout(PARTS)
    wire = torch.zeros(layout.wire_nbytes, dtype=torch.uint8)
    for peer, message in ((3, "expected a peer < 3, got 3"), (-1, "expected a peer >= 0, got -1")):
        with pytest.raises(ValueError, match=message):
            layout.for_peer(peer)
        with pytest.raises(ValueError, match=message):
            layout.frame(wire, peer)
    with pytest.raises(TypeError, match=r"expected a peer as an int, got 1\.0"):
        layout.for_peer(1.0)  # type: ignore[arg-type]
    with pytest.raises(WireError, match=r"expected a wire of .* bytes, got 32"):
        layout.frame(wire[:32], 0)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_all_to_all_in_one_process_sums_exactly(kernels: str, ranks: int) -> None:
    """Every rank sends each peer its frame, and each peer sums the frames it receives."""
    none = codec("none")
    runs = [(n, n % ranks) for n in (5, 0, 1, 64, 17, 300, 2)]
    starts = [sum(n for n, _ in runs[:i]) for i in range(len(runs))]
    parts = [Segment(none, n, start, peer) for (n, peer), start in zip(runs, starts)]
    layout = Layout(parts, peers=ranks)
    generator = torch.Generator().manual_seed(ranks)
    grads = [torch.randint(-99, 99, (389,), generator=generator).float() for _ in range(ranks)]
    wires = [layout.encode(grad, kernels=kernels) for grad in grads]
    exact = torch.stack(grads).sum(0)
    for peer in range(ranks):
        received = [layout.frame(wire, peer) for wire in wires]
        total = layout.for_peer(peer).decode_sum(received, kernels=kernels)
        own = [exact[s.offset : s.offset + s.numel] for s in parts if s.peer == peer]
        assert torch.equal(total, torch.cat([torch.empty(0), *own]))


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_damaged_frame_is_named(kernels: str) -> None:
    layout = Layout(PARTS)
    good = layout.encode(gradient(450), kernels=kernels)
    bad = good.clone()
    bad[layout.frames[2].start + 200] ^= 1
    with pytest.raises(WireError, match=r"^wire 1, frame 2: expected checksum 0x.*, got 0x"):
        layout.decode_sum([good, bad], kernels=kernels)
