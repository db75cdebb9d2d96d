"""What a layout keeps on a device: per stream, bounded, and never moved under a CUDA graph."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zcomm
from zcomm import Layout, Residuals, Segment, codec
from zcomm.fsdp import compressor as fsdp_compressor
from zcomm.kernels import device, memory
from zcomm.kernels.base import DecodeCall, EncodeCall
from zcomm.kernels.device import DeviceMemory, StreamMemory
from zcomm.kernels.device_kernels import DeviceKernels
from zcomm.sharding import hierarchy
from zcomm.transport.handshake import announcement

CPU = torch.device("cpu")
TABLE = torch.arange(4)


def stream(handle: int) -> device.Stream:
    found = device.Stream(CPU)
    found.handle = handle
    return found


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Whether a graph is being captured on the current stream."""
    state = SimpleNamespace(on=False)
    for module in (device, memory):
        monkeypatch.setattr(module, "capturing", lambda device: state.on)
    monkeypatch.setattr(device, "_captured", [])
    return state


def test_streams_share_nothing() -> None:
    """Another stream cannot see an upload until it is done."""
    of_layout = DeviceMemory()
    one, other = of_layout.on(stream(1)), of_layout.on(stream(2))
    assert of_layout.on(stream(1)) is one
    assert one.table(TABLE) == one.table(TABLE) != other.table(TABLE)
    assert one.reserved("encode", 64) == one.reserved("encode", 32) != other.reserved("encode", 64)
    assert one.address_table([1, 2]) == one.address_table([1, 2]) != other.address_table([1, 2])


def test_scratch_memory_grows_and_is_zero() -> None:
    found = StreamMemory(CPU)
    small = found.reserved("decode", 16)
    large = found.reserved("decode", 1 << 20)
    assert large != small
    assert found.reserved("decode", 16) == large
    assert not found._scratch["decode"].any()
    assert found._outgrown == []


def test_what_is_kept_is_bounded() -> None:
    of_layout = DeviceMemory()
    first = of_layout.on(stream(0))
    for i in range(1000):
        found = of_layout.on(stream(i))
        first.address_table([i, 7])
    assert len(of_layout._streams) == device._MAX_STREAMS
    assert of_layout.on(stream(999)) is found
    assert of_layout.on(stream(0)) is not first
    assert len(first._address_tables) == device._MAX_ADDRESS_TABLES
    assert (999, 7) in first._address_tables


def test_what_a_graph_was_captured_with_stays(capture: SimpleNamespace) -> None:
    of_layout = DeviceMemory()
    found = of_layout.on(stream(0))
    used = found.table(TABLE), found.reserved("decode", 16), found.address_table([1, 2])
    capture.on = True
    assert of_layout.on(stream(0)) is found
    assert (found.table(TABLE), found.reserved("decode", 16), found.address_table([1, 2])) == used
    capture.on = False
    tensors = [found._table, found._scratch["decode"], found._address_tables[1, 2]]
    found.reserved("decode", 32)
    for i in range(1000):
        of_layout.on(stream(i))
        found.address_table([i, 7])
    assert of_layout.on(stream(0)) is found
    assert found._table is tensors[0]
    assert found._outgrown == [tensors[1]]
    assert found._address_tables[1, 2] is tensors[2]
    assert device._captured == [found]  # whatever happens to the layout


def test_a_first_call_is_no_call_to_capture(capture: SimpleNamespace) -> None:
    found = StreamMemory(CPU)
    found.reserved("decode", 16)
    capture.on = True
    for call in (
        lambda: found.table(TABLE),
        lambda: found.reserved("encode", 16),
        lambda: found.reserved("decode", 32),
        lambda: found.address_table([1, 2]),
    ):
        with pytest.raises(RuntimeError, match=r"before a CUDA graph .* torch\.cuda\.graph\(graph"):
            call()
    layout = Layout([Segment(codec("int8"), 300)])
    residuals = Residuals(layout, [torch.zeros(300)])
    with pytest.raises(RuntimeError, match="expected a layout, residuals and wires"):
        residuals.addresses_on(CPU)
    capture.on = False
    found.reserved("encode", 16)
    before = residuals.addresses_on(CPU)
    capture.on = True
    found.reserved("encode", 16)
    assert residuals.addresses_on(CPU) == before


def test_launches_of_two_threads_do_not_mix() -> None:
    """A layout's scratch memory on a stream belongs to one call at a time."""

    class Slow(DeviceKernels):
        def __init__(self) -> None:
            super().__init__("slow")
            self.inside, self.most = 0, 0

        def launch_encode(self, *_: object) -> None:
            self.inside += 1
            self.most = max(self.most, self.inside)
            time.sleep(0.02)
            self.inside -= 1

        launch_decode_sum = launch_encode

    layout, slow = Layout([Segment(codec("int8"), 300)]), Slow()
    grad, wire = torch.zeros(300), torch.empty(layout.wire_nbytes, dtype=torch.uint8)
    calls = [lambda: slow.encode(layout, EncodeCall(grad, None, wire))] * 2
    calls += [lambda: slow.decode_sum(layout, DecodeCall([wire], grad))] * 2
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert slow.most == 1


def test_every_group_of_fsdp_has_a_side_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a shared stream, hops of two groups would wait for each other in rank-dependent order."""
    given: list[object] = []
    compressor: Any = object.__new__(fsdp_compressor.FsdpCompressor)
    compressor.device, compressor._engines, compressor._hosts = CPU, {}, {}
    compressor.settings = zcomm.Settings("lm4")
    compressor._ranks = lambda module: (module.process_group,)
    compressor._compared = dict
    compressor._make_engine = lambda caller, name, streams, grouped: given.append(streams)
    compressor.caller = lambda what, group: group
    alone = {"replica_group": None, "replica": 0, "rank": 0, "world_size": 2}
    compressor.modules = [SimpleNamespace(process_group=g, **alone) for g in ("one", "other")]
    monkeypatch.setattr(fsdp_compressor, "streams_of", lambda device: object())
    monkeypatch.setattr(fsdp_compressor.channels, "expect_sender", lambda *_: None)
    monkeypatch.setattr(fsdp_compressor, "expect_fresh_store", lambda _: None)
    said = announcement() | {"name": ""}
    monkeypatch.setattr(fsdp_compressor, "agree", lambda *_: [said] * 2)
    monkeypatch.setattr(hierarchy.dist, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(hierarchy.dist, "get_world_size", lambda: 2)
    compressor._meet()
    assert given[0] is not given[1]
