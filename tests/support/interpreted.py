"""The Triton kernels in Triton's interpreter, on the CPU's memory.

Whether kernels are interpreted or compiled is decided when they are imported, so that they have
processes of their own: those with ZCOMM_TRITON=interpreted (see kernel_sets.py).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

import torch

from zcomm.kernels.base import KernelLayout

NO_TRITON = "triton not found: its kernels are not interpreted"
FOUND = importlib.util.find_spec("triton") is not None
if "interpreted" in os.environ.get("ZCOMM_TRITON", "").split(","):
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports triton: available_kernels() does
# Time is spent per program and operation, not per element: large tiles for large segments.
TILES = (2048, 16384, 65536)


def new_kernels(name: str) -> object:
    """The kernel set, in a process that interprets."""
    from zcomm.kernels.triton import TritonKernels

    class Interpreted(TritonKernels):
        step_elements = TILES[-1]

        def tile_elements(self, layout: KernelLayout) -> int:
            most = max((s.numel for s in layout.segments), default=0)
            return next((tile for tile in TILES if tile >= most), TILES[-1])

    return Interpreted(name, launch)


def launch(variant: object, programs: int, arguments: Sequence[int]) -> None:
    import numpy

    from zcomm.kernels.triton.launch import launch as start

    patch_once()
    # A device does not know of the mode of the CPU's threads.
    flushing = bool(torch.tensor([1e-40]).mul(0.5).view(torch.int32).eq(0))
    torch.set_flush_denormal(False)
    with numpy.errstate(all="ignore"):  # NaN and infinities are among the inputs
        start(variant, programs, arguments)
    torch.set_flush_denormal(flushing)


def patch_once() -> None:
    """The language, for good: the interpreter would do it at every call of a function, which takes
    half of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    if interpreter._patch_lang is not _no_patch:
        for function in (tl.standard.zeros, tl.standard.sum):
            interpreter._patch_lang(function.fn)
        from zcomm.kernels.triton import tile

        interpreter._patch_lang(tile.words_at.fn)
        interpreter._patch_lang = _no_patch


def _no_patch(function: object) -> object:
    from triton.runtime import interpreter

    return interpreter._LangPatchScope()
