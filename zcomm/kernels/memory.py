"""Memory for kernels that need aligned addresses.

Tensors that torch allocates are aligned to their element size. Views of foreign memory may not be,
and a wire may be a slice at any byte: such memory is copied, and results are copied back.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from zcomm.kernels.base import KernelMemory, KernelResiduals

_RESIDUAL_ALIGNMENT = {torch.float32: 4, torch.bfloat16: 2, torch.int8: 2}  # int8: bf16 scales


def capturing(device: torch.device) -> bool:
    """Whether calls are being recorded into a CUDA graph instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def expect_no_capture(device: torch.device) -> None:
    """Call before filling memory for later calls: a graph would fill it only when replayed."""
    if capturing(device):
        raise RuntimeError(
            "expected a layout, residuals and wires that were used on this stream before a CUDA "
            "graph is captured on it, got new ones; make the same call before, on that stream: "
            "torch.cuda.graph(graph, stream=stream). Many wires may be the rows of one tensor"
        )


def upload(t: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, made from pinned memory so that nothing waits."""
    expect_no_capture(device)
    if device.type == "cpu":
        return t.clone()
    return t.pin_memory().to(device, non_blocking=True)


class Aligned:
    """A flat tensor's memory, or aligned memory in its place; `read` copies the contents in."""

    def __init__(self, memory: KernelMemory, nbytes: int = 0, *, read: bool = False) -> None:
        self._memory = memory
        self._copy: Tensor | None = None
        self.address = memory.data_ptr()
        if self.address % (nbytes or memory.dtype.itemsize):
            assert isinstance(memory, Tensor)
            self._copy = memory.clone() if read else torch.empty_like(memory)
            self.address = self._copy.data_ptr()

    def write_back(self, parts: Iterable[tuple[int, int]] | None = None) -> None:
        """Copies everything back, or only these (first, count) elements."""
        if self._copy is None:
            return
        for first, count in parts or [(0, self._copy.numel())]:
            self._memory[first : first + count].copy_(self._copy[first : first + count])


class AlignedResiduals:
    """The address tables of residuals, or of aligned copies."""

    def __init__(self, residuals: KernelResiduals | None) -> None:
        self._residuals = residuals
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by address
        if residuals and residuals.address_bits % _RESIDUAL_ALIGNMENT[residuals.dtype]:
            tensors = [*residuals.inputs, *residuals.outputs]
            self._copies = {t.data_ptr(): (t, t.clone()) for t in tensors if t is not None}

    def addresses_on(self, device: torch.device) -> tuple[int, int]:
        """The addresses of the tables in device memory."""
        if self._residuals is None:
            return 0, 0
        if not self._copies:
            return self._residuals.addresses_on(device)
        self._tables = [
            upload(torch.tensor([self._copy(t) for t in side], dtype=torch.int64), device)
            for side in (self._residuals.inputs, self._residuals.outputs)
        ]
        return self._tables[0].data_ptr(), self._tables[1].data_ptr()

    def write_back(self) -> None:
        for t, copy in self._copies.values():
            t.copy_(copy)

    def _copy(self, t: Tensor | None) -> int:
        return 0 if t is None else self._copies[t.data_ptr()][1].data_ptr()
