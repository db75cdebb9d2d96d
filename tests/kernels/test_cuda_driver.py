"""CUDA's driver through its C API: here the emulator's, which has the same function names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import emulated_driver
from zcomm import Layout, Segment, _core, codec
from zcomm.kernels import cuda, cuda_driver, cupy, nvrtc
from zcomm.kernels.base import segment_rows
from zcomm.kernels.cuda_driver import Driver


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> str:
    """The library that is loaded by default."""
    monkeypatch.setattr(cuda_driver, "LIBRARY", str(emulated_driver.library()))
    return cuda_driver.LIBRARY


def plan_of(spec: str) -> _core.Plan:
    layout = Layout([Segment(codec(spec), 300)])
    return _core.Plan(segment_rows(layout), layout.frames)


def test_it_is_there(library: str) -> None:
    assert cuda_driver.missing(13) == ""
    driver = Driver(library)
    driver.start()
    assert driver.version() == 13000
    assert driver.device_count() == 2
    assert driver.capability(1) == (8, 0)
    assert driver.context(0) != driver.context(1)


def test_reasons_why_it_is_absent(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_driver.missing(14) == "the CUDA driver is older than CUDA 14; update it"
    monkeypatch.setattr(Driver, "device_count", lambda driver: 0)
    assert cuda_driver.missing(13) == "no CUDA device"

    def refused(code: int) -> None:
        raise cuda_driver.DriverError(f"cuInit: expected success, got error {code}", code)

    monkeypatch.setattr(Driver, "start", lambda driver: refused(100))
    assert cuda_driver.missing(13) == "no CUDA device"
    monkeypatch.setattr(Driver, "start", lambda driver: refused(999))
    assert cuda_driver.missing(13) == "cuInit: expected success, got error 999"
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libnosuch.so.1")
    assert cuda_driver.missing(13) == "no CUDA driver"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_cupy_set_says_what_is_missing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "missing", lambda: "")
    assert cupy.missing() == "no CUDA driver"
    monkeypatch.setattr(nvrtc, "missing", lambda: "CuPy is not installed; pip install it")
    assert cupy.missing() == "CuPy is not installed; pip install it"


def test_the_cupy_set_wants_a_driver_of_nvrtcs_version(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "missing", lambda: "")
    monkeypatch.setattr(nvrtc, "missing_library", lambda: "")
    monkeypatch.setattr(nvrtc, "_binding", lambda: SimpleNamespace(getSupportedArchs=lambda: [80]))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for version, reason in (((13, 4), ""), ((14, 0), "the CUDA driver is older than CUDA 14; ")):
        monkeypatch.setattr(nvrtc, "version", lambda version=version: version)
        assert cupy.missing().startswith(reason)
        assert bool(cupy.missing()) == bool(reason)


def test_the_cupy_set_wants_a_gpu_that_nvrtc_compiles_for(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "missing", lambda: "")
    monkeypatch.setattr(nvrtc, "missing_library", lambda: "")
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "_binding", lambda: SimpleNamespace(getSupportedArchs=lambda: [75]))
    assert cupy.missing() == cuda.without_cuda() != ""  # this torch has no CUDA tensors
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert (cupy.missing(), cupy.missing(1)) == ("", "")
    assert cupy.missing(2) == "cuDeviceGet: expected success, got error 101"
    old = "NVRTC 13.0 compiles for GPUs of compute capability 7.5 or later, and this one has 7.0; "
    monkeypatch.setattr(Driver, "capability", lambda driver, ordinal: (7, 0))
    assert cupy.missing().startswith(old)


def test_a_refused_call_names_the_function(library: str) -> None:
    driver = Driver(library)
    with pytest.raises(RuntimeError, match="cuDeviceGet: expected success, got error 101"):
        driver.context(2)
    with pytest.raises(
        RuntimeError, match="cuInit: expected success, got CUDA_ERROR_INVALID_VALUE"
    ):
        driver._call("cuInit", 7)


def test_a_kernel_that_an_image_does_not_have_is_an_error() -> None:
    if emulated_driver.absent():
        pytest.skip(emulated_driver.absent())
    driver = Driver(str(emulated_driver.library()))
    ptx = emulated_driver.ptx_of(nvrtc.Unit("idle", 0), 80)
    emulated_driver.build(ptx)
    (function,) = driver.load(ptx, ["zc_find_idle"], 0)
    assert function
    with pytest.raises(RuntimeError, match=r"cuModuleGetFunction: .* CUDA_ERROR_NOT_FOUND"):
        driver.load(ptx, ["zc_find_idle", "zc_other"], 0)


def test_a_kernel_that_was_not_loaded_is_an_error(library: str) -> None:
    launcher = Driver(library).launcher(0)
    with pytest.raises(
        RuntimeError, match="expected a loaded kernel, got none for zc_decode_int8_1"
    ):
        launcher.decode_sum(plan_of("int8"), 0, 0, [0], 0, 0, True, 0, 0)
    with pytest.raises(IndexError):
        launcher.set_function(len(_core.KERNELS), 1)


def test_a_launch_that_the_driver_refuses_is_an_error(library: str) -> None:
    driver = Driver(library)
    launcher, plan = driver.launcher(0), plan_of("int8")
    for kernel in plan.kernels():
        launcher.set_function(kernel, driver._address("cuInit"))  # is not called
    with pytest.raises(RuntimeError, match="driver to take a launch, got CUDA_ERROR_INVALID_VALUE"):
        # Summing this many wires needs more shared memory than a kernel can get.
        launcher.decode_sum(plan, 0, 0, [0] * 7000, 0, 0, True, 0, 0)


def test_plans_name_what_they_launch() -> None:
    def names(spec: str) -> list[str]:
        return [_core.KERNELS[kernel][0] for kernel in plan_of(spec).kernels()]

    assert names("int8") == ["zc_find_idle", "zc_encode_int8_1", "zc_decode_int8_1"]
    assert names("lm4:block=512") == ["zc_find_idle", "zc_encode_lm4_4", "zc_decode_lm4_4"]
    assert names("topk:0.1")[1:] == [
        *(f"zc_topk_{part}" for part in ("digit_0", "digit_1", "digit_2", "count", "write")),
        "zc_decode_topk",
    ]
    assert len({symbol for symbol, _, _ in _core.KERNELS}) == len(_core.KERNELS) == 69
