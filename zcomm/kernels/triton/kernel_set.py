"""The triton kernel set: kernels for GPUs of any vendor, on torch's current stream."""

from __future__ import annotations

import struct
from typing import Any

from zcomm.kernels.base import KernelLayout
from zcomm.kernels.device import DeviceMemory, Stream, StreamMemory
from zcomm.kernels.device_kernels import WIRE_ALIGNMENT, DecodeLaunch, DeviceKernels, EncodeLaunch
from zcomm.kernels.triton.plan import TILE, Group, TilePlan
from zcomm.wire.header import CODEC_IDS

_WORD = 8
_KEEP_IDLE = 32  # the flags of tile.py


class TritonKernels(DeviceKernels):
    """The kernels, started by `launch`; by default on a device (launch.py)."""

    def __init__(self, name: str = "triton", launch: Any = None) -> None:
        from zcomm.kernels.triton import registry
        from zcomm.kernels.triton.launch import launch as on_device

        super().__init__(name)
        self._launch = launch or on_device
        self._registry = registry

    @property
    def step_elements(self) -> int:
        """How many of them at once; this does not change any result either."""
        return self._registry.STEP_ELEMENTS

    def tile_elements(self, layout: KernelLayout) -> int:
        """How many elements a program works on; this does not change any result."""
        return self._registry.TILE_ELEMENTS

    def launch_encode(self, layout: KernelLayout, stream: Stream, launch: EncodeLaunch) -> None:
        state = self._state(layout)
        memory, plan = state.memory.on(stream), state.plan
        flags = launch.grad_dtype | launch.verify << 4
        if launch.residual_inputs and plan.segments:
            flags |= launch.residual_dtype << 2 | launch.keep_idle * _KEEP_IDLE
        args = (
            memory.reserved("encode", _WORD * plan.encode_scratch_words()),
            launch.grad,
            launch.wire,
            launch.residual_inputs,
            launch.residual_outputs,
            _fp32_bits(launch.prescale),
            flags,
        )
        table = memory.table(plan.table)
        if flags & _KEEP_IDLE:
            self._launch(self._variant("find_idle", plan), plan.segments, (table, 0, *args))
        self._run(plan, "encode", table, args)

    def launch_decode_sum(self, layout: KernelLayout, stream: Stream, launch: DecodeLaunch) -> None:
        state, wires = self._state(layout), len(launch.wires)
        memory, plan = state.memory.on(stream), state.plan
        args = (
            memory.reserved("decode", _WORD * plan.decode_scratch_words(wires)),
            *_spacing(launch.wires, memory),
            wires,
            launch.out,
            launch.faults,
            int(launch.verify),
        )
        self._run(plan, "decode", memory.table(plan.table), args)

    def _run(self, plan: TilePlan, what: str, table: int, args: tuple[int, ...]) -> None:
        """One launch for each group of tiles; several for an encode of topk."""
        for group in plan.groups:
            tiles = table + _WORD * (plan.tiles_at + len(TILE) * group.first_tile)
            for name in self._names(what, group):
                self._launch(self._variant(name, plan), group.tiles, (table, tiles, *args))

    def _variant(self, name: str, plan: TilePlan) -> Any:
        return self._registry.variant(name, plan.tile_elements, self.step_elements)

    def _names(self, what: str, group: Group) -> tuple[str, ...]:
        if what == "encode" and group.codec == CODEC_IDS["topk"]:
            names: tuple[str, ...] = self._registry.topk_encode()
            return names
        return (self._registry.variant_name(what, group.codec, group.block),)

    def _state(self, layout: KernelLayout) -> _State:
        found: _State | None = layout.device_plans.get(self.name)
        if found is None:
            plan = TilePlan(layout, self.tile_elements(layout))
            found = layout.device_plans[self.name] = _State(plan)
        return found


class _State:
    """A layout's plan, and its memory on devices."""

    def __init__(self, plan: TilePlan) -> None:
        self.plan = plan
        self.memory = DeviceMemory()


def _spacing(rows: list[int], memory: StreamMemory) -> tuple[int, int]:
    """The first wire's address and how far apart they lie; or a table of addresses, and 0."""
    stride = rows[1] - rows[0] if len(rows) > 1 else WIRE_ALIGNMENT
    if stride and all(b - a == stride for a, b in zip(rows, rows[1:])):
        return rows[0], stride
    return memory.address_table(rows), 0


def _fp32_bits(x: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", x))[0])
