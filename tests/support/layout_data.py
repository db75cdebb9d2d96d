"""A layout with gaps, several codecs, an empty segment and a peer without any; what calls make."""

from __future__ import annotations

import torch
from torch import Tensor

from contract_data import Outcome
from zcomm import Layout, Residuals, Segment, codec

PARTS = [
    Segment(codec("lm4"), 300, offset=10, peer=2),
    Segment(codec("none"), 7, offset=0, peer=0),
    Segment(codec("topk:0.1"), 50, offset=400, peer=0),
    Segment(codec("int8"), 0, offset=310, peer=2),
    Segment(codec("int8:block=32"), 77, offset=320, peer=2),
]


def gradient(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def encode(
    layout: Layout,
    grad: Tensor,
    stored: list[Tensor] | None,
    kernels: str,
    threads: int | None = None,
) -> Outcome:
    """All segments' residuals come one after another."""
    new = [torch.zeros_like(t) for t in stored or []]
    held = Residuals(layout, stored, new) if stored else None
    wire = layout.encode(grad, held, prescale=1 / 3, kernels=kernels, threads=threads)
    decoded = layout.decode_sum([wire] * 3, kernels=kernels, threads=threads)
    return Outcome(wire, torch.cat(new) if new else torch.empty(0), decoded)
