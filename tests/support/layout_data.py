"""A layout with gaps, several codecs, an empty segment and a peer without any."""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm import Segment, codec

PARTS = [
    Segment(codec("lm4"), 300, offset=10, peer=2),
    Segment(codec("none"), 7, offset=0, peer=0),
    Segment(codec("topk:0.1"), 50, offset=400, peer=0),
    Segment(codec("int8"), 0, offset=310, peer=2),
    Segment(codec("int8:block=32"), 77, offset=320, peer=2),
]


def gradient(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))
