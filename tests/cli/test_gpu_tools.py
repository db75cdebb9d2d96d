"""`zcomm doctor` and GPUs: which ones exist, and whether zcomm's kernels can use them."""

from __future__ import annotations

import pytest
import torch

import zcomm
from zcomm.cli.doctor import self_test
from zcomm.conformance import gpu_tools, vectors
from zcomm.report.finding import NOTE, OK, PROBLEM, Finding

GPU = "NVIDIA H100, compute capability 9.0"


def with_gpus(
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[str],
    module: object,
    kernels_absent: str,
    chosen: str = "cuda",
) -> Finding:
    monkeypatch.setattr(gpu_tools, "_gpus", lambda: gpus)
    monkeypatch.setattr(gpu_tools.cuda, "load", lambda: module)
    monkeypatch.setattr(gpu_tools.cuda, "missing", lambda: kernels_absent)
    monkeypatch.setattr(gpu_tools.kernels, "default", lambda device_type: chosen)
    return gpu_tools.check()


def test_a_gpu_with_kernels_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_gpus(monkeypatch, [GPU], object(), "")
    assert found.state == OK
    assert found.lines[1:3] == [f"GPU: {GPU}", "zcomm's CUDA kernels: available"]
    assert "compressed there, by cuda." in found.lines[3]
    assert "python -m zcomm.selftest --device cuda" in found.lines[3]
    assert (found.details["gpus"], found.details["kernels_absent"]) == ([GPU], "")


@pytest.mark.parametrize(
    ("module", "absent", "remedy"),
    [
        ("no module", "zcomm._cuda cannot be imported: no file", "pip install 'zcomm[cupy]'"),
        (object(), "no CUDA driver", "keeps the compiled kernels from running: no CUDA driver."),
    ],
    ids=["no module", "no driver"],
)
def test_a_gpu_without_kernels_is_a_problem(
    module: object, absent: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = with_gpus(monkeypatch, [GPU], module, absent, "reference")
    assert found.state == PROBLEM
    assert found.lines[2] == f"zcomm's CUDA kernels: unavailable: {absent}"
    assert "Gradients on these GPUs go through plain torch" in found.lines[3]
    assert remedy in found.remedy


def test_another_kernel_set_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_gpus(monkeypatch, [GPU], "no module", "zcomm._cuda cannot be imported", "cupy")
    assert found.state == OK
    assert "compressed there, by cupy." in found.lines[3]


def test_amds_gpus_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    found = with_gpus(monkeypatch, ["AMD MI300X"], "no module", "for ROCm", "reference")
    assert found.state == PROBLEM
    assert "pip install 'zcomm[triton]'" in found.remedy


def test_without_a_gpu_absent_kernels_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tools, "absent", lambda: "no CUDA driver; install NVIDIA's driver")
    found = with_gpus(monkeypatch, [], object(), "no CUDA driver", "reference")
    assert found.state == NOTE
    assert found.lines[1] == "zcomm's CUDA kernels: unavailable: no CUDA driver"
    assert found.lines[2].startswith("Gradients on the CPU need none of this.")
    assert found.lines[2].endswith("No usable GPU: no CUDA driver; install NVIDIA's driver")


def test_vectors_of_cuda_kernels_are_made_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {}
    on = {"cpu:scalar": "cpu", "cuda": "cuda", "cupy": "cuda", "triton": "xpu"}
    monkeypatch.setattr(zcomm, "available_kernels", lambda: dict.fromkeys(on, ""))
    monkeypatch.setattr(
        vectors, "differences", lambda whole, name, device: tried.setdefault(name, device) and []
    )
    assert self_test.check_vectors().state == OK
    assert {name: device.type for name, device in tried.items()} == on
