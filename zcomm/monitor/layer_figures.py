"""Figures of each layer: the size of its gradient, and how much of it encoding leaves out.

    g                  this rank's own gradient of a parameter, as it enters the hook
    e                  this rank's residual of it (first hop), with feedback
    x = g / W + e      what this rank of W encodes
    grad_norm          ‖g‖
    residual_norm      ‖e‖ after the step
    compression_error  ‖x − decode(encode(x))‖ / ‖x‖

This only reads gradients and residuals: no bit of the training changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zcomm.codecs import Codec
from zcomm.codecs.layout import Layout, Residuals
from zcomm.ddp.buckets import Part
from zcomm.ddp.compressor import DdpCompressor
from zcomm.sharding.chunks import Chunk
from zcomm.torch_private import foreach

# fp32 sums of this many squares are good to 1e-6. Longer tensors are summed in parts, in fp64.
_EXACT_NUMEL = 1 << 16


@dataclass(frozen=True)
class Layer:
    """A parameter in one step, on this rank. Norms are L2; a loss scale is divided out.

    grad_norm          of this rank's own gradient as it enters the hook, before averaging
    residual_norm      of this rank's residual after the step, in units of the mean gradient, as in
                       `handle.state_dict()["residuals"]["sent"]`; None without feedback
    compression_error  ‖x − decoded‖ / ‖x‖ of what this rank encoded: x is its gradient / W, plus
                       its residual from before the step. 0 if nothing is lost: for uncompressed
                       parameters, and on a single rank, which sends nothing
    """

    grad_norm: float
    residual_norm: float | None
    compression_error: float


class Squares(NamedTuple):
    """Sums of squares over one or more parameters: of g, of x, and of what x lost."""

    grad: float = 0.0
    encoded: float = 0.0
    left_out: float = 0.0

    def plus(self, other: Squares) -> Squares:
        return Squares(*map(sum, zip(self, other)))

    def error(self) -> float:
        return math.sqrt(self.left_out / self.encoded) if self.left_out else 0.0


class LayerFigures:
    """The layers of one step, measured bucket by bucket before the engine gets them."""

    def __init__(self, compressor: DdpCompressor) -> None:
        self._compressor = compressor
        self._squares: dict[str, Squares] = {}

    @torch.no_grad()
    def take(self, parts: Sequence[Part], buffer: Tensor) -> None:
        """Measures a bucket's gradients, and encodes them once more to see what is left out.

        It goes chunk by chunk, so it needs no more memory than three chunks.
        """
        side = self._compressor.feedback.side
        for part in parts:
            self._squares |= {item.key: Squares() for item in part.items}
            for index, chunk in enumerate(part.chunks):
                hop = part.feedback[side][index].sent if part.feedback else None
                self._take_chunk(chunk, buffer, hop.residuals.inputs if hop else None)

    def _take_chunk(
        self, chunk: Chunk, buffer: Tensor, residuals: Sequence[Tensor | None] | None
    ) -> None:
        segments = chunk.wire.segments
        x = torch.empty(chunk.numel, dtype=chunk.sum_dtype, device=buffer.device)
        parts = torch.split(x, [s.numel for s in segments])
        foreach.copy_(parts, [buffer[s.offset : s.offset + s.numel] for s in segments])
        grads = squares(parts)
        idle = [not g and not part.any() for g, part in zip(grads, parts)] if residuals else []
        x.mul_(1 / self._compressor.world_size)
        for piece, part, residual in zip(chunk.pieces, parts, residuals or ()):
            if residual is not None:
                part.add_(_values(piece.item.codec, residual, part.numel()))
        encoded = (
            squares(parts) if residuals else [g / self._compressor.world_size**2 for g in grads]
        )
        left_out = self._left_out(chunk, x, encoded)
        for i, is_idle in enumerate(idle):
            if is_idle:  # it sends zeros and keeps its residual
                left_out[i] = encoded[i]
        for piece, *values in zip(chunk.pieces, grads, encoded, left_out):
            key = piece.item.key
            self._squares[key] = self._squares[key].plus(Squares(*values))

    def _left_out(self, chunk: Chunk, x: Tensor, encoded: Sequence[float]) -> list[float]:
        """For each segment, the sum of squares of what the wire leaves out."""
        layout = chunk.packed
        lossy = [piece.item.codec.name != "none" for piece in chunk.pieces]
        if not any(lossy) or self._compressor.engine is None or not isinstance(layout, Layout):
            return [0.0] * len(lossy)
        left = torch.zeros_like(x)
        threads = self._compressor.settings.threads
        layout.encode(x, Residuals(layout, left), verify=False, threads=threads)
        found = squares(torch.split(left, [s.numel for s in layout.segments]))
        # Blocks with NaN or Inf do not change their residual, which is zero here.
        for i, v in enumerate(encoded):
            if lossy[i] and not math.isfinite(v):
                found[i] = math.nan
        return found

    def finish(self) -> tuple[Layer, dict[str, Layer]]:
        """After the step: all layers together, and each by its parameter's name."""
        scale, residuals = self._compressor.scale, self._residual_norms()
        layers = {
            name: Layer(math.sqrt(found.grad) / scale, residuals.get(name), found.error())
            for name, found in self._squares.items()
        }
        total = Squares(*map(math.fsum, zip(*self._squares.values())))
        residual = math.hypot(*residuals.values()) if residuals else None
        return Layer(math.sqrt(total.grad) / scale, residual, total.error()), layers

    @torch.no_grad()
    def _residual_norms(self) -> dict[str, float]:
        feedback, scale = self._compressor.feedback, self._compressor.scale
        return {
            name: math.sqrt(squares([storage.read(feedback.side)])[0]) / scale
            for name, storage in feedback.held("sent").items()
        }


def squares(tensors: Sequence[Tensor]) -> list[float]:
    """The sum of squares of each tensor."""
    parts = [torch.split(t, _EXACT_NUMEL) for t in tensors]
    flat = [part for of_one in parts for part in of_one]
    if not flat:
        return []
    dtype = torch.float64 if flat[0].dtype is torch.float64 else torch.float32
    norms = torch.stack(foreach.norm(flat, dtype=dtype)).double().square()
    counts = [len(of_one) for of_one in parts]
    return [float(of_one.sum()) for of_one in torch.split(norms, counts)]


def _values(codec: Codec, residual: Tensor, numel: int) -> Tensor:
    return codec.read_residual(residual, numel) if residual.dtype is torch.int8 else residual
