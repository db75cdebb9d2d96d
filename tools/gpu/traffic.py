"""The bytes that kernels move, counted by the emulator, against the minimum for each codec.

An encode reads its input once and writes the wire and the residual once; a decode_sum reads each
wire once and writes the sum once. topk reads its input five times (three digits of the threshold,
the counts, the entries), and may read entries twice in decode_sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zcomm import Codec, Layout, Residuals, Segment, codec, kernels
from zcomm.kernels.cuda import CudaKernels

TOPK_INPUT_PASSES, TOPK_ENTRY_PASSES = 5, 2
LIMIT, TOPK_LIMIT = 1.10, 1.20  # times the minimum
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}


@dataclass(frozen=True)
class Call:
    """An encode of a gradient (its residual, if any, in place), or the sum of some wires."""

    spec: str
    n: int
    grad: torch.dtype = torch.float32
    storage: torch.dtype | None = None
    wires: int = 0  # 0 for an encode

    @property
    def name(self) -> str:
        if self.wires:
            return f"decode_sum of {self.wires}"
        residual = f"{NAMES[self.storage]} residual" if self.storage else "no residual"
        return f"encode {NAMES[self.grad]}, {residual}"

    @cached_property
    def codec(self) -> Codec:
        return codec(self.spec)

    @property
    def limit(self) -> float:
        return TOPK_LIMIT if self.codec.name == "topk" else LIMIT

    @property
    def minimum(self) -> int:
        """The bytes that the wire format requires."""
        is_topk = self.codec.name == "topk"
        wire = self.codec.wire_nbytes(self.n)
        if self.wires:
            passes = TOPK_ENTRY_PASSES if is_topk else 1
            return 4 * self.n + self.wires * passes * wire
        residual = self.new_residual().nbytes if self.storage else 0
        passes = TOPK_INPUT_PASSES if is_topk else 1
        return passes * (self.grad.itemsize * self.n + residual) + residual + wire

    def new_residual(self) -> Tensor:
        assert self.storage is not None
        return self.codec.new_residual(self.n, self.storage)


@dataclass(frozen=True)
class Traffic:
    """The bytes that a call moved, and its warp shuffles."""

    call: Call
    loaded: int
    stored: int
    shuffles: int

    @property
    def nbytes(self) -> int:
        return self.loaded + self.stored

    @property
    def ratio(self) -> float:
        return self.nbytes / self.call.minimum

    @property
    def failure(self) -> str:
        if self.ratio <= self.call.limit:
            return ""
        return (
            f"{self.call.spec} {self.call.name}, {self.call.n} elements: expected at most "
            f"{self.call.limit} times the least bytes, got {self.ratio:.3f}"
        )


def calls(spec: str, n: int) -> list[Call]:
    return [
        Call(spec, n, torch.float32, torch.float32),
        Call(spec, n, torch.float32, torch.int8),
        Call(spec, n, torch.bfloat16),
        Call(spec, n, wires=1),
        Call(spec, n, wires=4),
    ]


class Counter:
    """Runs calls on an emulated module (emulator/emulated.py) that counts."""

    def __init__(self, module: Any) -> None:
        self._module, self._name = module, module.__name__
        kernels.register(self._name, CudaKernels(module, self._name))

    def count(self, call: Call) -> Traffic:
        layout, name = Layout([Segment(call.codec, call.n)]), self._name
        if call.wires:
            wires = [layout.encode(_gradient(call, seed)) for seed in range(call.wires)]
            out = torch.empty(call.n)
            return self._counted(call, lambda: layout.decode_sum(wires, out=out, kernels=name))
        residuals = Residuals(layout, [call.new_residual()]) if call.storage else None
        grad, wire = _gradient(call), torch.empty(layout.wire_nbytes, dtype=torch.uint8)
        return self._counted(call, lambda: layout.encode(grad, residuals, out=wire, kernels=name))

    def _counted(self, call: Call, run: Callable[[], Tensor]) -> Traffic:
        self._module.count_sectors(True)
        run()
        loaded, stored = self._module.traffic()
        traffic = Traffic(call, loaded, stored, self._module.shuffles())
        self._module.count_sectors(False)
        return traffic


def _gradient(call: Call, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(call.n, generator=generator).to(call.grad)
