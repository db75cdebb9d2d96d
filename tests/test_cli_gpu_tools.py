"""`zcomm doctor` about GPUs: those that there are, and whether zcomm's kernels can use them."""

from __future__ import annotations

import pytest

import zcomm
from zcomm import vectors
from zcomm.cli import gpu_tools, self_test
from zcomm.cli.finding import NOTE, OK, PROBLEM, Finding

GPU = "NVIDIA H100, compute capability 9.0"


def with_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], module: object, kernels_absent: str
) -> Finding:
    monkeypatch.setattr(gpu_tools, "_gpus", lambda: gpus)
    monkeypatch.setattr(gpu_tools.cuda, "load", lambda: module)
    monkeypatch.setattr(gpu_tools.cuda, "missing", lambda: kernels_absent)
    return gpu_tools.check()


def test_a_gpu_with_kernels_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_gpus(monkeypatch, [GPU], object(), "")
    assert found.state == OK
    assert found.lines[1:3] == [f"GPU: {GPU}", "zcomm's CUDA kernels: there"]
    assert "python -m zcomm.selftest --device cuda" in found.lines[3]
    assert (found.details["gpus"], found.details["kernels_absent"]) == ([GPU], "")


@pytest.mark.parametrize(
    ("module", "absent", "remedy"),
    [
        ("no module", "zcomm._cuda cannot be imported: no file", "ZCOMM_CUDA=1 pip install ."),
        (object(), "no CUDA driver", "Make the CUDA driver usable for zcomm (no CUDA driver)"),
    ],
    ids=["no module", "no driver"],
)
def test_a_gpu_without_kernels_is_a_problem(
    module: object, absent: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = with_gpus(monkeypatch, [GPU], module, absent)
    assert found.state == PROBLEM
    assert found.lines[2] == f"zcomm's CUDA kernels: absent: {absent}"
    assert "Gradients on these GPUs are refused" in found.lines[3]
    assert remedy in found.remedy


def test_without_a_gpu_absent_kernels_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tools, "absent", lambda: "no CUDA driver; install NVIDIA's driver")
    found = with_gpus(monkeypatch, [], object(), "no CUDA driver")
    assert found.state == NOTE
    assert found.lines[1] == "zcomm's CUDA kernels: absent: no CUDA driver"
    assert found.lines[2].startswith("Gradients on the CPU need none of this.")
    assert found.lines[2].endswith("No GPU can be used: no CUDA driver; install NVIDIA's driver")


def test_vectors_of_cuda_kernels_are_made_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {}
    monkeypatch.setattr(zcomm, "available_kernels", lambda: {"cpu:scalar": "", "cuda": ""})
    monkeypatch.setattr(
        vectors, "differences", lambda whole, name, device: tried.setdefault(name, device) and []
    )
    assert self_test.check_vectors().state == OK
    assert {name: device.type for name, device in tried.items()} == {
        "cpu:scalar": "cpu",
        "cuda": "cuda",
    }
