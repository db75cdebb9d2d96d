"""The cupy kernel set without a GPU: NVRTC's PTX, launched by zcomm._core, on the emulator.

Part of the contract: all codecs in fp32, three in all dtypes. `make gpu-proof` runs all of it.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import emulated_driver
from contract_data import (
    CASES,
    GRAD_DTYPES,
    SPECS,
    STORAGES,
    assert_same_outcome,
    reference,
    run_case,
)
from planted_bugs import BUGS, assert_found, planted
from zcomm import Layout, Residuals, Segment, WireError, codec, kernels
from zcomm.kernels import cuda_driver, nvrtc
from zcomm.kernels.nvrtc import Unit

NAME = "cupy:nvrtc80"
# The others need kernels for blocks of more than 128 elements, which are slow to compile.
SMALL = [spec for spec in SPECS if codec(spec).block <= 128]
WIDE = ("int8", "lm4", "topk:0.1")

pytestmark = pytest.mark.skipif(bool(emulated_driver.absent()), reason=emulated_driver.absent())
kernels.register(NAME, emulated_driver.Lazy(NAME, 80))


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (spec, dtype)
        for spec in SMALL
        for dtype in GRAD_DTYPES
        if dtype == torch.float32 or spec in WIDE
    ],
    ids=str,
)
def test_same_bytes_as_the_reference(spec: str, dtype: torch.dtype) -> None:
    for case in CASES:
        for storage in STORAGES:
            expected = reference(spec, dtype, storage, case)
            got = run_case(NAME, spec, dtype, storage, case)
            assert_same_outcome(got, expected, (case, storage))


def everything() -> Layout:
    """Segments of all codecs for three peers; one peer gets nothing."""
    sizes = [700, 3000, 129, 20_000, 1]
    segments, offset = [], 0
    for i, spec in enumerate(SMALL):
        n = sizes[i % len(sizes)]
        segments.append(Segment(codec(spec), n, offset, (0, 2)[i % 2]))
        offset += n
    return Layout(segments, 3)


def test_one_call_serves_all_codecs_peers_and_idle_segments() -> None:
    layout = everything()
    g = torch.Generator().manual_seed(5)
    grad, residual = (torch.randn(layout.span, generator=g) for _ in range(2))
    idle = layout.segments[3]
    grad[idle.offset : idle.offset + idle.numel] = 0
    found = []
    for name in ("reference", NAME):
        held = residual.clone()
        wire = layout.encode(grad, Residuals(layout, held), keep_idle=True, kernels=name)
        many = layout.decode_sum([wire] * 70, kernels=name)  # too many for kernel arguments
        found.append((wire, held, layout.decode_sum([wire] * 3, kernels=name), many))
    for expected, got in zip(*found):
        assert torch.equal(expected, got)


def test_damaged_wires_are_refused() -> None:
    layout = everything()
    good = layout.encode(torch.randn(layout.span, generator=torch.Generator().manual_seed(6)))
    for at in (0, 20, 100, good.numel() - 1):
        bad = good.clone()
        bad[at] ^= 1
        with pytest.raises(WireError) as caught:
            layout.decode_sum([good, bad], kernels=NAME)
        assert caught.value.wire_index == 1


def test_a_thread_that_has_not_used_the_device_can_launch() -> None:
    """The driver needs a current context in each thread, including the engine's."""
    c, x = codec("int8"), torch.randn(300, generator=torch.Generator().manual_seed(7))
    expected, found = c.encode(x), []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(c.encode(x, kernels=NAME)))
        thread.start()
        thread.join()
    assert [torch.equal(wire, expected) for wire in found] == [True, True]


def test_only_what_a_layout_needs_is_compiled_and_once() -> None:
    asked: list[Unit] = []

    def images(unit: Unit, device: torch.device) -> bytes:
        asked.append(unit)
        ptx = emulated_driver.ptx_of(unit, 80)
        emulated_driver.build(ptx)
        return ptx

    driver = cuda_driver.Driver(str(emulated_driver.library()))
    kernels.register("cupy:asked", emulated_driver.CupyKernels("cupy:asked", driver, images))
    x = torch.ones(500)
    for spec in ("int8", "int8", "int8:block=32", "topk:0.5"):
        codec(spec).encode(x, kernels="cupy:asked")
    assert asked == [Unit("idle", 0), Unit("int8", 1), Unit("topk", 0), Unit("topk_decode", 0)]


def test_a_planted_bug_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources given to NVRTC add in a different order."""
    bug = BUGS[-1]
    monkeypatch.setattr(nvrtc, "SOURCES", planted(tmp_path, bug.codec, bug))
    nvrtc._headers.cache_clear()
    kernels.register("cupy:planted", emulated_driver.kernel_set("cupy:planted", 80))
    try:
        assert_found("cupy:planted", bug.codec)
    finally:
        nvrtc._headers.cache_clear()


def test_an_image_that_the_driver_refuses_is_an_error() -> None:
    driver = cuda_driver.Driver(str(emulated_driver.library()))
    broken = emulated_driver.CupyKernels("cupy:broken", driver, lambda *_: b"no PTX")
    kernels.register("cupy:broken", broken)
    with pytest.raises(RuntimeError, match=r"cuModuleLoadData: expected success, got .*\.so"):
        codec("int8").encode(torch.ones(3), kernels="cupy:broken")
