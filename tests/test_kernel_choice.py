"""Which kernel set tensors use: each set made unavailable in turn, by name, and on every device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import zcomm
from zcomm import kernels
from zcomm.cli import doctor
from zcomm.kernels import cuda, cupy

CUDA, XPU, MPS, CPU = (torch.device(t) for t in ("cuda:0", "xpu:0", "mps:0", "cpu"))
ORDER = ("cuda", "cupy", "triton")


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The sets that are unavailable; all others for GPUs are there."""
    found: set[str] = set()

    def module(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            missing=lambda: f"no {name} today" if name in found else "",
            CupyKernels=lambda: SimpleNamespace(name="cupy"),
            TritonKernels=lambda: SimpleNamespace(name="triton"),
        )

    monkeypatch.delenv("ZCOMM_KERNELS", raising=False)
    monkeypatch.setattr(kernels, "_module", module)
    monkeypatch.setattr(cuda, "load", object)
    for cache in (kernels._select, kernels._warn_of_reference):
        cache.cache_clear()
    yield found
    for cache in (kernels._select, kernels._warn_of_reference):
        cache.cache_clear()


@pytest.mark.parametrize("there", list(product([True, False], repeat=3)), ids=str)
def test_cuda_tensors_use_the_first_that_is_there(there: tuple[bool, ...], lost: set[str]) -> None:
    lost |= {name for name, is_there in zip(ORDER, there) if not is_there}
    present = [name for name in ORDER if name not in lost]
    expected = (*present, "reference")[0]
    assert kernels.default("cuda") == expected
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert kernels.select(CUDA).name == expected
        assert kernels.select(torch.device("cuda:1")).name == expected
    assert len(caught) == (expected == "reference")
    for name in ORDER:
        if name in lost:
            with pytest.raises(RuntimeError, match=f"kernels {name} are absent: no {name} today"):
                kernels.select(CUDA, name)
        else:
            assert kernels.select(CUDA, name).name == name
    assert {name: why for name, why in kernels.available().items() if name in ORDER} == {
        name: f"no {name} today" if name in lost else "" for name in ORDER
    }


def test_falling_to_the_reference_warns_once_with_all_reasons(lost: set[str]) -> None:
    lost |= set(ORDER)
    with pytest.warns(UserWarning, match="no kernels for tensors on cuda") as caught:
        kernels.select(CUDA)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "cuda: no cuda today; cupy: no cupy today; triton: no triton today." in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.select(CUDA)
        kernels.select(torch.device("cuda:1"))


def test_a_reference_that_was_asked_for_is_no_warning(
    lost: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost |= set(ORDER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.select(CUDA, "reference").name == "reference"
        monkeypatch.setenv("ZCOMM_KERNELS", "reference")
        assert kernels.select(CUDA).name == "reference"
        assert kernels.select(CPU).name == "reference"


def test_other_gpus_use_triton(lost: set[str]) -> None:
    assert kernels.select(XPU).name == "triton"
    for name in ("cuda", "cupy"):
        with pytest.raises(ValueError, match=f"kernels {name}: expected tensors on cuda, got xpu"):
            kernels.select(XPU, name)
    with pytest.raises(
        ValueError, match="kernels triton: expected tensors on cuda or xpu, got mps"
    ):
        kernels.select(MPS, "triton")
    with pytest.raises(
        ValueError, match="kernels triton: expected tensors on cuda or xpu, got cpu"
    ):
        zcomm.codec("int8").encode(torch.ones(3), kernels="triton")
    with pytest.warns(UserWarning, match="tensors on mps, .* No kernel set takes such tensors"):
        assert kernels.select(MPS).name == "reference"


def test_without_triton_other_gpus_use_the_reference(lost: set[str]) -> None:
    lost.add("triton")
    with pytest.warns(UserWarning, match="tensors on xpu, .* slower. triton: no triton today"):
        assert kernels.select(XPU).name == "reference"


@pytest.mark.parametrize("name", ORDER)
def test_the_environment_forces_one(
    name: str, lost: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZCOMM_KERNELS", name)
    assert kernels.select(CUDA).name == name
    assert kernels.default("cuda") == "cuda"  # what it would be without
    kernels._select.cache_clear()
    lost.add(name)
    with pytest.raises(RuntimeError, match=f"kernels {name} are absent: no {name} today"):
        kernels.select(CUDA)
    with pytest.raises(ValueError, match=f"kernels {name}: expected tensors on cuda.*, got cpu"):
        kernels.select(CPU)


def test_sets_of_the_cpu_are_not_replaced(lost: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.cpu, "_load", lambda: "zcomm._core cannot be imported: no file")
    assert kernels.default("cpu") == "cpu"
    with pytest.raises(RuntimeError, match=r"kernels cpu are absent: .* no file"):
        kernels.select(CPU)


def test_rocm_calls_its_gpus_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for module in (cuda, cupy):
        assert module.missing() == "this torch is for AMD GPUs (ROCm), not for CUDA"


def test_a_set_that_cannot_be_imported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"no file for {name}")

    monkeypatch.setattr(kernels, "_module", fail)
    found = kernels.available()
    assert found["cupy"] == "zcomm.kernels.cupy cannot be imported: no file for cupy"
    assert kernels.default("cuda") == "reference"


def test_doctor_shows_the_sets_and_the_choice(
    lost: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost |= {"cuda"}
    found = doctor.check_kernels()
    assert "cuda        absent: no cuda today" in found.lines
    assert "cupy        there" in found.lines
    assert found.lines[-1] == "chosen for CPU tensors: cpu; for CUDA tensors: cupy"
    assert found.details["chosen"] == {"cpu": "cpu", "cuda": "cupy"}
    monkeypatch.setenv("ZCOMM_KERNELS", "triton")
    assert doctor.check_kernels().lines[-1].endswith("; but ZCOMM_KERNELS=triton names triton")
