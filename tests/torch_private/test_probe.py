"""Each corner says which of its names torch lacks; what needs one raises that text."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from zcomm import torch_private
from zcomm.cli.doctor import command as doctor
from zcomm.report.finding import NOTE, OK, PROBLEM
from zcomm.torch_private import CORNERS, probe

# Before torch 2.9, FSDP2 had no communication objects that can be replaced.
HAS_FSDP = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)
NAMES = [
    (corner, name)
    for corner in CORNERS
    if corner != "fsdp" or HAS_FSDP
    for name in import_module(f"zcomm.torch_private.{corner}")._corner.names
]


def take_away(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As if torch had no such name: what has it becomes an empty class."""
    *path, owner, last = name.split(".")
    if not path:
        monkeypatch.delattr(torch, last)
    else:
        # torch.optim hides its modules: the name may be one that only an import finds.
        monkeypatch.setattr(probe._find(".".join(path)), owner, type(owner, (), {}), raising=False)


def fresh(corner: str) -> ModuleType:
    """A corner as it is when it is imported with the torch of this moment."""
    original = import_module(f"zcomm.torch_private.{corner}")
    spec = importlib.util.spec_from_file_location(f"fresh_{corner}", original.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(text: str) -> list[str]:
    return text.replace(",", "").replace(";", "").split()


def test_this_torch_has_everything() -> None:
    assert set(torch_private.missing()) == (set() if HAS_FSDP else {"fsdp"})


def test_every_corner_is_listed() -> None:
    folder = torch_private.__path__[0]
    found = {path.stem for path in Path(folder).glob("*.py")}
    assert found == {*CORNERS, "probe", "__init__"}


@pytest.mark.parametrize(("corner", "name"), NAMES)
def test_a_missing_name_is_named(monkeypatch: pytest.MonkeyPatch, corner: str, name: str) -> None:
    missing = import_module(f"zcomm.torch_private.{corner}").missing
    with monkeypatch.context() as patch:
        take_away(patch, name)
        text = missing()
    assert f"to {probe.NEWEST}, got {torch.__version__}, which has no torch." in text
    assert name in words(text)
    assert missing() == ""


@pytest.mark.parametrize(
    "name",
    [
        "torch._never",
        "torch.never.there",
        "torch.Tensor._never",
        "torch.nn.parallel.DistributedDataParallel._never",
        "torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce._never",
        "torch.ops.aten._never.default",
    ],
)
def test_names_that_no_torch_has_are_missing(name: str) -> None:
    assert name in words(probe.Corner(name).missing())


def test_one_of_several_names_is_enough() -> None:
    for name in ("torch.Tensor._never|_version", "torch.Tensor._version|_never"):
        assert probe.Corner().bind(name) is torch.Tensor._version
    lost = "torch.Tensor._never|_ever"
    assert lost in words(probe.Corner(lost).missing())


def test_zcomm_fsdp_names_the_versions_that_it_needs() -> None:
    """As if torch were too old, or too new: import zcomm works, zcomm.fsdp does not."""
    api = "torch.distributed.fsdp._fully_shard._fsdp_api"
    take_away = f"import {api} as api; vars(api).pop('AllGather', None)"
    code = f"{take_away}; import zcomm; print('imported'); zcomm.fsdp.compress"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "imported"
    error = done.stderr.strip().splitlines()[-1]
    start = f"RuntimeError: zcomm.fsdp: expected torch 2.9 to 2.15, got {torch.__version__}, which"
    assert error.startswith(f"{start} has no torch.distributed.fsdp."), error
    assert error.endswith("; pip install 'torch==2.15.*'")


@pytest.mark.parametrize(
    ("corner", "name", "use"),
    [
        ("autograd", "torch._C._current_graph_task_id", lambda m: m.graph_task_id()),
        (
            "autograd",
            "torch.autograd.Variable._execution_engine.queue_callback",
            lambda m: m.at_end_of_backward(print),
        ),
        (
            "c10d",
            "torch.distributed.ProcessGroup._get_backend",
            lambda m: m.backend_of(None, torch.device("cpu")),
        ),
        ("ddp", "torch.nn.parallel.DistributedDataParallel._comm_hooks", lambda m: m.comm_hooks(0)),
        ("foreach", "torch._foreach_add_", lambda m: m.add_([], [])),
        (
            "fsdp",
            "torch.distributed.fsdp._fully_shard._fsdp_api.AllGather",
            lambda m: type("OfZcomm", (m.AllGather,), {}),
        ),
        (
            "fsdp",
            "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._orig_size",
            lambda m: m.Param(None),
        ),
        ("autograd", "torch._C._profiler._RecordFunctionFast", lambda m: m.Range("zcomm::x")),
        ("tensors", "torch.UntypedStorage._cdata", lambda m: m.storage_key(None)),
    ],
)
def test_what_needs_a_missing_name_says_so(
    monkeypatch: pytest.MonkeyPatch, corner: str, name: str, use: Any
) -> None:
    with monkeypatch.context() as patch:
        take_away(patch, name)
        module = fresh(corner)
        error: RuntimeError | None = None
        try:
            use(module)
        except RuntimeError as raised:
            error = raised
    assert error is not None
    assert "has no " in str(error)
    assert name in words(str(error))


def test_a_name_that_is_there_costs_nothing() -> None:
    """Names are the objects of torch themselves."""
    corner = probe.Corner()
    assert corner.bind("torch._foreach_add_") is torch._foreach_add_
    assert corner.needs("torch._foreach_add_")(fresh) is fresh


def test_import_zcomm_leaves_fsdp_and_the_compiler_alone() -> None:
    code = "import sys, zcomm; print({'torch._dynamo', 'torch.distributed.fsdp'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_doctor_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_private().state == (OK if HAS_FSDP else NOTE)
    for lost, state in (("fsdp", NOTE), ("c10d", PROBLEM)):
        monkeypatch.setattr(torch_private, "missing", lambda lost=lost: {lost: "torch 3 has no x"})
        found = doctor.check_private()
        assert found.state == state
        assert found.lines[0] == "torch 3 has no x"
    assert found.remedy == "Install a torch that zcomm is tested with: 2.6 to 2.15."
