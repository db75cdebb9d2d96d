"""The reference kernel set: plain torch, any device, one segment after another.

It implements the wire format plainly; the other kernel sets are compared with it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zcomm.kernels import base
from zcomm.kernels.base import DecodeCall, EncodeCall, KernelLayout, wire_error
from zcomm.wire import header as frames
from zcomm.wire.header import Frame, WireError
from zcomm.wire.segments import Segment

# From this size up, torch splits element-wise operations among threads.
_GRAIN = 32768
_FP32_MAX = torch.finfo(torch.float32).max


class ReferenceKernels:
    name = "reference"

    @torch.no_grad()
    def encode(self, layout: KernelLayout, call: EncodeCall) -> None:
        grad, device = call.grad, call.grad.device
        with _subnormals_kept(device, layout.numel):
            buffer = torch.zeros(layout.wire_nbytes, dtype=torch.uint8, device=device)
            factor = torch.tensor(call.prescale, dtype=torch.float32, device=device)
            for i, segment in enumerate(layout.segments):
                if segment.numel:
                    v = _slice(grad, segment).to(torch.float32) * factor
                    idle = call.keep_idle and not bool(_slice(grad, segment).any())
                    body = _encode_segment(segment, v, call.residuals, i, idle)
                    buffer[layout.body_starts[i] :][: body.numel()] = body
            for frame in layout.frames:
                _write_header(buffer, frame, call.verify)
            call.wire.copy_(buffer)

    @torch.no_grad()
    def decode_sum(self, layout: KernelLayout, call: DecodeCall) -> None:
        with _subnormals_kept(call.out.device, layout.numel):
            # A copy is aligned, so it can be read as wider integers.
            wires = [torch.cat(list(call.wires))] if call.apart else call.wires
            copies = [wire.clone(memory_format=torch.contiguous_format) for wire in wires]
            for w, wire in enumerate(copies):
                _check_frames(layout, wire, call.verify, w)
            for i, segment in enumerate(layout.segments):
                if segment.numel:
                    _slice(call.out, segment).copy_(_decode_segment(layout, i, copies))


def _slice(flat: base.KernelMemory, segment: Segment) -> Tensor:
    return flat[segment.offset : segment.offset + segment.numel]


def _encode_segment(
    segment: Segment, v: Tensor, residuals: base.KernelResiduals | None, index: int, idle: bool
) -> Tensor:
    """The body; overwrites the segment's residual, or keeps it if the segment is idle."""
    codec = segment.codec
    stored = residuals.inputs[index] if residuals else None
    target = residuals.outputs[index] if residuals else None
    if stored is None or target is None:
        return codec.encode_body(v).body
    if idle:
        target.copy_(stored)
        return codec.encode_body(v).body
    v = v + codec.read_residual(stored, segment.numel)
    encoded = codec.encode_body(v)
    # Near the fp32 maximum, lm* may decode to the opposite sign; clamping keeps residuals finite.
    left = (v - encoded.decoded).clamp(-_FP32_MAX, _FP32_MAX)
    new = codec.write_residual(left, encoded.kept, stored)
    target.copy_(new)
    return encoded.body


def _write_header(buffer: Tensor, frame: Frame, verify: bool) -> None:
    whole = buffer[frame.start : frame.start + frame.nbytes]
    header = whole[: frames.HEADER_NBYTES]
    header.copy_(_bytes(frames.frame_header(frame, verify=verify)))
    if verify:
        total = frames.checksum(whole)
        header.copy_(_bytes(frames.frame_header(frame, verify=True, checksum=total)))


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _check_frames(layout: KernelLayout, wire: Tensor, verify: bool, index: int) -> None:
    for f, frame in enumerate(layout.frames):
        whole = wire[frame.start : frame.start + frame.nbytes]
        try:
            header = bytes(whole[: frames.HEADER_NBYTES].tolist())
            stored = frames.check_header(header, frame, verify=verify)
            if verify and stored != frames.checksum(whole):
                raise WireError(f"expected checksum {frames.checksum(whole):#x}, got {stored:#x}")
        except WireError as error:
            raise wire_error(layout, index, str(error), frame=f) from None


def _decode_segment(layout: KernelLayout, index: int, wires: Sequence[Tensor]) -> Tensor:
    """The sum over wires in order, starting from the first wire's terms."""
    segment, start = layout.segments[index], layout.body_starts[index]
    total: Tensor | None = None
    for w, wire in enumerate(wires):
        body = wire[start : start + segment.codec.body_nbytes(segment.numel)]
        try:
            terms = segment.codec.decode_body(body, segment.numel)
        except WireError as error:
            raise wire_error(layout, w, str(error), segment=index) from None
        total = terms if total is None else total + terms
    assert total is not None
    return segment.codec.finish_sum(total, segment.numel)


@contextmanager
def _subnormals_kept(device: torch.device, numel: int) -> Iterator[None]:
    """Suspends torch.set_flush_denormal(True) within the context.

    The mode is per thread, and threads in torch's pool may have inherited it, where we cannot
    change it; if so, everything runs in the calling thread.
    """
    if device.type != "cpu":
        yield
        return
    flushing, pool_flushing = _flushes(1), numel >= _GRAIN and _flushes(_GRAIN)
    if not (flushing or pool_flushing):
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushing)
        torch.set_num_threads(threads)


def _flushes(per_thread: int) -> bool:
    """Whether subnormal products become 0 in this thread or, from _GRAIN up, in any thread."""
    count = 1 if per_thread == 1 else per_thread * torch.get_num_threads()
    subnormal = torch.full((count,), 0x00400000, dtype=torch.int32, device="cpu")
    halves = subnormal.view(torch.float32) * 0.5
    return bool((halves.view(torch.int32) == 0).any())
