"""The cpu kernel sets: compiled code, one set per instruction set architecture (ISA).

`zcomm._core` does not depend on torch: it takes addresses and sizes, and releases the GIL.
"""

import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from zcomm.kernels import base
from zcomm.kernels.base import DecodeCall, EncodeCall, KernelLayout, KernelResiduals

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
        self._core.encode(
            native_layout(layout),
            self.isa,
            threads or torch.get_num_threads(),
            grad.data_ptr(),
            base.GRAD_DTYPES[grad.dtype],
            prescale,
            *_held(residuals),
            wire.data_ptr(),
            verify,
            keep_idle,
        )

    def decode_sum(self, layout: KernelLayout, call: DecodeCall) -> None:
        refused = self._core.decode_sum(
            native_layout(layout),
            self.isa,
            call.threads or torch.get_num_threads(),
            [wire.data_ptr() for wire in call.wires],
            call.out.data_ptr(),
            call.verify,
            call.apart,
        )
        if refused is not None:
            raise base.wire_error(layout, *refused)


def native_layout(layout: KernelLayout) -> Any:
    """The form of a layout that native code takes."""
    if layout.native is None:
        from zcomm import _core

        layout.native = _core.Layout(base.segment_rows(layout), layout.frames)
    return layout.native


# What native code has to know of many chunks at once (csrc/shm/): made once, used in every step.


def strips(runs: Sequence[Sequence[tuple[int, int]]]) -> Any:
    """Strips of a flat tensor: offsets and elements."""
    from zcomm import _core

    return _core.Strips(runs)


def coded_chunks(
    rank: int, world_size: int, layouts: Iterable[tuple[KernelLayout, KernelLayout]]
) -> Any:
    """Each chunk's layouts: of all frames, and of this rank's."""
    from zcomm import _core

    pairs = [(native_layout(wire), native_layout(own)) for wire, own in layouts]
    return _core.CodedChunks(rank, world_size, pairs)


def owned_parts(parts: Iterable[tuple[KernelLayout, int]]) -> Any:
    """Where what this rank owns of each chunk lies: a layout, and the element that it begins at."""
    from zcomm import _core

    return _core.OwnedParts([(native_layout(layout), at) for layout, at in parts])


def residual_tables(residuals: Iterable[KernelResiduals | None]) -> Any:
    """The tables of each chunk's residuals."""
    from zcomm import _core

    return _core.ResidualTables([_held(one) for one in residuals])


def call(
    reduce: bool,
    gather: bool,
    signature: int = 0,
    timeout_s: float = 0.0,
    spins: int = 0,
    brief: bool = False,
    begun: int | None = None,
) -> Any:
    """A collective, and how its ranks wait for each other in the ring."""
    from zcomm import _core

    return _core.Call(reduce, gather, signature, timeout_s, spins, brief, begun)


def coded_job(*args: Any) -> Any:
    """See _core.CodedJob."""
    from zcomm import _core

    return _core.CodedJob(*args)


def parcels(rank: int, world_size: int, address: int, nbytes: int) -> Any:
    """Parcels of all ranks, `nbytes` apart."""
    from zcomm import _core

    return _core.Parcels(rank, world_size, address, nbytes)


def _held(residuals: KernelResiduals | None) -> tuple[int, int, int]:
    """The tables of addresses, before and after, and the number of the dtype."""
    if residuals is None:
        return 0, 0, 0
    dtype = base.RESIDUAL_DTYPES[residuals.dtype]
    return residuals.in_addresses, residuals.out_addresses, dtype


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
