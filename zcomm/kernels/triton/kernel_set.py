"""The triton kernel set: kernels for GPUs of any make, on torch's current stream.

Calls neither wait for the device nor allocate, once a layout's tables have been uploaded: its first
call on each device. Scratch memory belongs to a layout and a stream.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zcomm.kernels.base import KernelLayout, KernelMemory, KernelResiduals
from zcomm.kernels.device import MAX_WIRES, NO_FAULT, DeviceMemory, Stream, fault_error, new_faults
from zcomm.kernels.memory import Aligned, AlignedResiduals
from zcomm.kernels.native import GRAD_DTYPES, RESIDUAL_DTYPES
from zcomm.kernels.triton.plan import TILE, Group, Plan
from zcomm.wire import CODEC_IDS

WIRE_ALIGNMENT = 16
_WORD = 8
_KEEP_IDLE = 32  # the flags of tile.py


class TritonKernels:
    """The kernels, started by `launch` (launch.py): on a device, or otherwise."""

    def __init__(self, name: str = "triton", launch: Any = None) -> None:
        from zcomm.kernels.triton import registry
        from zcomm.kernels.triton.launch import launch as on_device

        self.name = name
        self._launch = launch or on_device
        self._registry = registry

    @property
    def step_elements(self) -> int:
        """How many of them at once: of no influence either."""
        return self._registry.STEP_ELEMENTS

    def tile_elements(self, layout: KernelLayout) -> int:
        """How many elements a program works on: of no influence on any result."""
        return self._registry.TILE_ELEMENTS

    def encode(
        self,
        layout: KernelLayout,
        grad: KernelMemory,
        residuals: KernelResiduals | None,
        wire: Tensor,
        prescale: float,
        verify: bool,
        threads: int | None,
        keep_idle: bool = False,
    ) -> None:
        state, stream = self._state(layout), Stream(wire.device)
        source, target = Aligned(grad, read=True), Aligned(wire, WIRE_ALIGNMENT)
        held = AlignedResiduals(residuals)
        flags = GRAD_DTYPES[grad.dtype] | verify << 4
        if residuals and state.plan.segments:
            flags |= RESIDUAL_DTYPES[residuals.dtype] << 2 | keep_idle * _KEEP_IDLE
        with stream.device_current():
            call = (
                state.memory.reserved("encode", _WORD * state.plan.encode_scratch_words(), stream),
                source.address,
                target.address,
                *held.addresses_on(stream.device),
                _fp32_bits(prescale),
                flags,
            )
            if flags & _KEEP_IDLE:
                self._find_idle(state, stream, call)
            self._run(state, "encode", stream, call)
        target.write_back()
        held.write_back()

    def decode_sum(
        self,
        layout: KernelLayout,
        wires: Sequence[Tensor],
        out: KernelMemory,
        verify: bool,
        threads: int | None,
        faults: Tensor | None = None,
    ) -> None:
        """With `faults` a refused wire lowers its value; without, the device is waited for."""
        if len(wires) > MAX_WIRES:
            raise ValueError(
                f"kernels {self.name}: expected at most {MAX_WIRES} wires, got {len(wires)}; "
                "use 'reference'"
            )
        state, stream = self._state(layout), Stream(wires[0].device)
        seen = new_faults(stream.device) if faults is None else faults
        aligned = [Aligned(wire, WIRE_ALIGNMENT, read=True) for wire in wires]
        rows = [wire.address for wire in aligned]
        target = Aligned(out)
        with stream.device_current():
            words = state.plan.decode_scratch_words(len(rows))
            call = (
                state.memory.reserved("decode", _WORD * words, stream),
                *_spacing(rows, state.memory, stream),
                len(rows),
                target.address,
                seen.data_ptr(),
                int(verify),
            )
            self._run(state, "decode", stream, call)
        target.write_back((s.offset, s.numel) for s in layout.segments)
        if faults is None and (fault := int(seen.item())) != NO_FAULT:
            raise fault_error(fault, layout)

    def _find_idle(self, state: _State, stream: Stream, call: tuple[int, ...]) -> None:
        table = state.memory.table(state.plan.table, stream)
        variant = self._variant("find_idle", state.plan)
        self._launch(variant, state.plan.segments, (table, 0, *call))

    def _run(self, state: _State, what: str, stream: Stream, call: tuple[int, ...]) -> None:
        """One launch for each group of tiles; several for an encode of topk."""
        table = state.memory.table(state.plan.table, stream)
        for group in state.plan.groups:
            tiles = table + _WORD * (state.plan.tiles_at + len(TILE) * group.first_tile)
            for name in self._names(what, group):
                variant = self._variant(name, state.plan)
                self._launch(variant, group.tiles, (table, tiles, *call))

    def _variant(self, name: str, plan: Plan) -> Any:
        return self._registry.variant(name, plan.tile_elements, self.step_elements)

    def _names(self, what: str, group: Group) -> tuple[str, ...]:
        if what == "encode" and group.codec == CODEC_IDS["topk"]:
            names: tuple[str, ...] = self._registry.topk_encode()
            return names
        return (self._registry.variant_name(what, group.codec, group.block),)

    def _state(self, layout: KernelLayout) -> _State:
        found: _State | None = layout.device_plans.get(self.name)
        if found is None:
            plan = Plan(layout, self.tile_elements(layout))
            found = layout.device_plans[self.name] = _State(plan)
        return found


class _State:
    """A layout's plan, and its memory on devices."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.memory = DeviceMemory()


def _spacing(rows: list[int], memory: DeviceMemory, stream: Stream) -> tuple[int, int]:
    """The first wire's address and how far apart they lie; or a table of addresses, and 0."""
    stride = rows[1] - rows[0] if len(rows) > 1 else WIRE_ALIGNMENT
    if stride and all(b - a == stride for a, b in zip(rows, rows[1:])):
        return rows[0], stride
    return memory.address_table(rows, stream), 0


def _fp32_bits(x: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", x))[0])
