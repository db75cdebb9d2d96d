"""Which kernel set tensors use: with each set unavailable in turn, by name, and on every device."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ranks import run_ranks
from zcomm import kernels
from zcomm.cli.doctor import command as doctor
from zcomm.cli.doctor import self_test
from zcomm.conformance import gpu_tools
from zcomm.kernels import cuda, cupy
from zcomm.launch import ranks
from zcomm.report.finding import NOTE, OK, PROBLEM

CUDA, XPU, MPS, CPU = (torch.device(t) for t in ("cuda:0", "xpu:0", "mps:0", "cpu"))
ORDER = ("cuda", "cupy", "triton")


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The unavailable sets; all other GPU sets are available."""
    found: set[str] = set()

    def module(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            missing=lambda ordinal=0: f"no {name} today" if name in found else "",
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
    assert kernels.default("cuda") == "cuda"  # the default without the variable
    kernels._select.cache_clear()
    lost.add(name)
    with pytest.raises(RuntimeError, match=f"kernels {name} are absent: no {name} today"):
        kernels.select(CUDA)
    wrong = f"kernels {name}: expected tensors on cuda.*, got cpu; unset ZCOMM_KERNELS"
    with pytest.raises(ValueError, match=wrong):
        kernels.select(CPU)


def compress_with(rank: int, world_size: int, name: str) -> str:
    """The error on a rank whose environment names these kernels."""
    os.environ["ZCOMM_KERNELS"] = name
    try:
        zcomm.compress(DistributedDataParallel(nn.Linear(4, 4)), codec="int8")
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def test_a_wrong_environment_is_an_error_of_compress_not_of_backward() -> None:
    for said in run_ranks(2, compress_with, "foo"):
        assert said.startswith("ZCOMM_KERNELS: expected one of reference, cpu")
        assert said.endswith("got 'foo'")


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
    assert "cuda        unavailable: no cuda today" in found.lines
    assert "cupy        available" in found.lines
    assert found.lines[-1] == "default for CPU tensors: cpu; for CUDA tensors: cupy"
    assert found.details["chosen"] == {"cpu": "cpu", "cuda": "cupy"}
    monkeypatch.setenv("ZCOMM_KERNELS", "triton")
    found = doctor.check_kernels()
    said = "but ZCOMM_KERNELS=triton forces triton, for tensors on cuda or xpu"
    assert (found.state, found.lines[-1]) == (NOTE, said)
    for name, meaning in (("cuda", "cuda, which is unavailable"), ("foo", "no set")):
        monkeypatch.setenv("ZCOMM_KERNELS", name)
        found = doctor.check_kernels()
        assert found.state == PROBLEM
        assert found.lines[-1] == f"but ZCOMM_KERNELS={name} names {meaning}"
        assert found.remedy.startswith(f"Unset ZCOMM_KERNELS={name}")


def test_doctor_has_no_processor_to_blame_for_a_set_of_gpus(
    lost: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZCOMM_KERNELS", "cupy")
    assert doctor.check_processor().state == OK
    monkeypatch.setenv("ZCOMM_KERNELS", "reference")
    found = doctor.check_processor()
    assert found.state == NOTE
    assert found.lines[-1].endswith("none (plain torch), set by ZCOMM_KERNELS=reference")
    monkeypatch.setenv("ZCOMM_KERNELS", "foo")
    assert doctor.check_processor().state == PROBLEM


def test_doctor_names_the_set_that_gradients_on_gpus_use(
    lost: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_tools, "_gpus", lambda: ["A GPU, compute capability 9.0"])
    monkeypatch.setattr(cuda, "missing", lambda ordinal=0: "")
    assert "are compressed there, by cuda." in gpu_tools.check().lines[-1]
    monkeypatch.setenv("ZCOMM_KERNELS", "triton")
    assert "are compressed there, by triton." in gpu_tools.check().lines[-1]
    for name, remedy in (
        ("reference", "Unset ZCOMM_KERNELS=reference, unless you want that."),
        ("cpu:avx2", "Unset ZCOMM_KERNELS."),
    ):
        monkeypatch.setenv("ZCOMM_KERNELS", name)
        found = gpu_tools.check()
        assert (found.state, found.remedy) == (PROBLEM, remedy)


def test_a_module_without_code_for_a_gpu_is_absent_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an A100 and a V100, and a CUDA build of torch."""
    capabilities = [(8, 0), (7, 0)]
    module = SimpleNamespace(
        missing=str, ARCHS=[75, 80, 90], capability=lambda ordinal: capabilities[ordinal]
    )
    monkeypatch.setattr(cuda, "load", lambda: module)
    assert cuda.missing() == cuda.without_cuda()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert cuda.missing(0) == ""
    assert cuda.missing(1) == (
        "zcomm._cuda was built for compute capability 7.5, 8.0, 9.0, and this GPU has 7.0; build "
        "it with ZCOMM_CUDA_ARCHS=70, or use CuPy or Triton"
    )
    monkeypatch.setattr(kernels, "_module", {"cuda": cuda, "triton": cuda}.__getitem__)
    monkeypatch.setitem(kernels.ON_GPUS, "cupy", ())
    assert kernels.default("cuda", 0) == "cuda"
    assert kernels.default("cuda", 1) == "reference"


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((8, 9), [75, 80, 90], True),  # same major version, and older
        ((8, 0), [75, 86], False),
        ((10, 0), [75, 80, 90], True),  # PTX for the last
        ((9, 0), [75, 80, 100], False),
        ((12, 1), [90, 100, 120], True),
    ],
)
def test_what_code_runs_where(capability: tuple[int, int], archs: list[int], runs: bool) -> None:
    assert (cuda.no_code(capability, archs) == "") is runs


def test_an_empty_name_is_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"kernels: expected one of reference, .*, got ''"):
        zcomm.codec("int8").encode(torch.ones(3), kernels="")
    monkeypatch.setenv("ZCOMM_KERNELS", "")  # same as unset
    kernels._select.cache_clear()
    assert kernels.select(CPU).name.startswith("cpu:")


def test_doctors_ranks_have_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def world(size: int, *, group_timeout_s: float, env: dict[str, str]) -> None:
        seen.append(env)
        raise OSError("no ranks today")

    monkeypatch.setattr(ranks, "World", world)
    for name in ("cupy", "reference"):
        monkeypatch.setenv("ZCOMM_KERNELS", name)
        self_test._run.__wrapped__("lo")  # not what it found for another check
    assert [env.get("ZCOMM_KERNELS") for env in seen] == ["", None]
