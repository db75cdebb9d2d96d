"""The forms that compiled kernel sets take: numbers for dtypes, rows for segments and frames."""

import torch

from zcomm.kernels.base import KernelLayout
from zcomm.wire.header import Frame

# codec, log2 of the block, elements, k, offset, frame, body
SegmentRow = tuple[int, int, int, int, int, int, int]

GRAD_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
RESIDUAL_DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 3}


def segment_rows(layout: KernelLayout) -> list[SegmentRow]:
    return [
        (s.codec.id, s.codec.log2_block, s.numel, s.codec.k(s.numel), s.offset, s.peer, start)
        for s, start in zip(layout.segments, layout.body_starts)
    ]


def frame_rows(layout: KernelLayout) -> list[Frame]:
    return list(layout.frames)
