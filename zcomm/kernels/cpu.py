"""The cpu kernel sets: compiled code, one set per instruction set architecture (ISA).

`zcomm._core` does not depend on torch: it takes addresses and sizes, and releases the GIL.
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from zcomm.kernels import base
from zcomm.kernels.base import DecodeCall, EncodeCall, KernelLayout

ISAS = ("scalar", "avx2", "avx512")
ISA_VARIABLE = "ZCOMM_CPU_ISA"


class CpuKernels:
    """The compiled kernels of one ISA."""

    def __init__(self, isa: str) -> None:
        from zcomm import _core

        self.name = f"cpu:{isa}"
        self._core = _core
        self.isa = ISAS.index(isa)

    def encode(self, layout: KernelLayout, call: EncodeCall) -> None:
        grad, residuals, wire, prescale, verify, threads, keep_idle = call
        held = 0, 0, 0
        if residuals is not None:
            dtype = base.RESIDUAL_DTYPES[residuals.dtype]
            held = residuals.in_addresses, residuals.out_addresses, dtype
        self._core.encode(
            layout.native or self._native(layout),
            self.isa,
            threads or torch.get_num_threads(),
            grad.data_ptr(),
            base.GRAD_DTYPES[grad.dtype],
            prescale,
            *held,
            wire.data_ptr(),
            verify,
            keep_idle,
        )

    def decode_sum(self, layout: KernelLayout, call: DecodeCall) -> None:
        refused = self._core.decode_sum(
            layout.native or self._native(layout),
            self.isa,
            call.threads or torch.get_num_threads(),
            [wire.data_ptr() for wire in call.wires],
            call.out.data_ptr(),
            call.verify,
            call.apart,
        )
        if refused is not None:
            raise base.wire_error(layout, *refused)

    def _native(self, layout: KernelLayout) -> Any:
        layout.native = self._core.Layout(base.segment_rows(layout), layout.frames)
        return layout.native


def strips(runs: Sequence[Sequence[tuple[int, int]]]) -> Any:
    """Strips of a flat tensor for native code: offsets and elements."""
    from zcomm import _core

    return _core.Strips(runs)


@lru_cache(maxsize=1)
def _load() -> ModuleType | str:
    """The native module, or why it cannot be loaded."""
    try:
        from zcomm import _core
    except ImportError as error:
        return f"zcomm._core cannot be imported: {error}"
    return _core


def missing(isa: str) -> str:
    """Why this ISA's kernels are unavailable; "" if they are available."""
    core = _load()
    if isinstance(core, str):
        return core
    if isa not in core.built_isas():
        return f"this build has {', '.join(core.built_isas())}, not {isa}"
    return "" if isa in core.isas() else f"this CPU does not support {isa}"


def chosen_isa() -> str:
    """The ISA that `cpu` uses: the one set in the environment, or else the fastest here."""
    forced = os.environ.get(ISA_VARIABLE)
    if forced and forced not in ISAS:
        raise ValueError(f"{ISA_VARIABLE}: expected one of {', '.join(ISAS)}, got {forced!r}")
    core = _load()
    return forced or (ISAS[0] if isinstance(core, str) else str(core.isas()[-1]))
