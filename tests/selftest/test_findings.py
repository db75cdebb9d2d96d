"""`python -m zcomm.selftest`: right kernels pass, each kind of wrong one is found and named."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
from zcomm import kernels
from zcomm.conformance import contract
from zcomm.kernels.cpu import CpuKernels
from zcomm.kernels.cuda import CudaKernels
from zcomm.report.finding import NOTE, OK, PROBLEM
from zcomm.selftest import command
from zcomm.wire.header import WireError

CPU = torch.device("cpu")


def run(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the report."""
    file = tmp_path / "report.json"
    code = command.main(["--device", "cpu", "--quick", "--json", str(file), *options])
    return code, json.loads(file.read_text())


def test_the_cpu_is_right_and_the_report_has_all_parts(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    options = ["--device", "cpu", "--quick", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "zcomm.selftest", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.endswith("\neverything is correct\n")
    report = json.loads(file.read_text())
    assert report["right"] is True
    assert report["environment"]["kernels"].startswith("cpu:")
    assert report["environment"]["torch"].startswith(torch.__version__)
    parts = report["parts"]
    assert list(parts) == list(command.PARTS)
    assert {name: part["state"] for name, part in parts.items()} == {
        **dict.fromkeys(parts, OK),
        "graph": NOTE,
    }
    codecs = len(contract.SPECS)
    # Wire, residual and decoded values of each case, and sums of two kinds of wires.
    assert parts["contract"]["checks"] == codecs * (3 * 4 * 6 * 3 + 9 + 10)
    assert parts["damage"]["checks"] > 40 * codecs
    assert parts["vectors"]["vectors"] > codecs
    assert parts["engine"]["two_ranks"] is True
    assert set(parts["speed"]["calls"]) >= set(contract.NAMES)
    assert all(name in done.stdout for name in (*command.PARTS, "GB/s", *contract.NAMES))
    assert list(tmp_path.iterdir()) == [file]


# Kernel sets that are wrong in one way, for lm4 alone.


class WrongKernels(CpuKernels):
    def __init__(self) -> None:
        super().__init__("scalar")
        self.name = type(self).__name__

    def encode(self, layout: Any, call: Any) -> None:
        super().encode(layout, call)
        if layout.numel and layout.segments[0].codec.name == "lm4":
            self.spoil(call.wire, call.residuals, call.grad)

    def spoil(self, wire: Tensor, residuals: Any, grad: Tensor) -> None:
        pass


class OneWireBit(WrongKernels):
    def spoil(self, wire: Tensor, residuals: Any, grad: Tensor) -> None:
        wire[-1] ^= 1


class OneResidualBit(WrongKernels):
    def spoil(self, wire: Tensor, residuals: Any, grad: Tensor) -> None:
        if residuals is not None:
            residuals.outputs[0].view(torch.int8)[0] ^= 1


class WritesBehind(WrongKernels):
    def spoil(self, wire: Tensor, residuals: Any, grad: Tensor) -> None:
        ctypes.memset(wire.data_ptr() + wire.numel(), 0, 1)


class ChangesTheGradient(WrongKernels):
    def spoil(self, wire: Tensor, residuals: Any, grad: Tensor) -> None:
        grad.view(torch.int8)[0] ^= 1


class Raises(WrongKernels):
    def spoil(self, wire: Tensor, residuals: Any, grad: Tensor) -> None:
        raise RuntimeError("an illegal memory access was encountered")


class AcceptsDamage(WrongKernels):
    def decode_sum(self, layout: Any, call: Any) -> None:
        try:
            super().decode_sum(layout, call)
        except WireError:
            if layout.segments[0].codec.name != "lm4":
                raise


class NamesAnotherWire(WrongKernels):
    def decode_sum(self, layout: Any, call: Any) -> None:
        try:
            super().decode_sum(layout, call)
        except WireError as error:
            wrong = layout.segments[0].codec.name == "lm4"
            raise WireError(str(error), (error.wire_index or 0) + wrong) from None


class AddsInAnotherOrder(WrongKernels):
    def decode_sum(self, layout: Any, call: Any) -> None:
        if layout.segments[0].codec.name == "lm4":
            call = call._replace(wires=call.wires[::-1])
        super().decode_sum(layout, call)


@pytest.mark.parametrize(
    ("wrong", "part", "text"),
    [
        (OneWireBit, "contract", "wire, torch.float32 gradient, None residual"),
        (OneWireBit, "layouts", "wire, 1 segments"),
        (OneResidualBit, "contract", "residual, torch.float32 gradient, torch.float32 residual"),
        (OneResidualBit, "layouts", "residual, 1 segments"),
        (WritesBehind, "contract", "expected no writes outside the tensors"),
        (ChangesTheGradient, "contract", "gradient after encode: 1 differ"),
        (Raises, "contract", "RuntimeError: an illegal memory access"),
        (AcceptsDamage, "damage", "expected the wire to be refused, got its values"),
        (NamesAnotherWire, "damage", "expected wire 0 to be refused, got wire 0: expected"),
        (AddsInAnotherOrder, "contract", "sum of 3 wires of 1153 elements"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_wrong_kernels_are_found_and_the_codec_is_named(
    wrong: type[WrongKernels], part: str, text: str, tmp_path: Path, capsys: Any
) -> None:
    kernels.register(wrong.__name__, wrong())
    options = ["--kernels", wrong.__name__, "--codecs", "int8,lm4", "--parts", part]
    code, report = run(tmp_path, *options)
    out = capsys.readouterr().out
    assert (code, report["right"]) == (1, False)
    found = report["parts"][part]
    assert found["state"] == PROBLEM
    assert set(found["wrong"]) == {"lm4"}
    assert 0 < found["wrong"]["lm4"] < found["checks"]
    assert any(fault.startswith("lm4: ") and text in fault for fault in found["first"])
    assert "\nproblem  " in out
    assert "lm4: " in out
    assert out.endswith("Do not train with these kernels on this device; send us this report.\n")


def test_wrong_kernels_do_not_make_the_vectors(tmp_path: Path) -> None:
    kernels.register("OneWireBit", OneWireBit())
    code, report = run(tmp_path, "--kernels", "OneWireBit", "--parts", "vectors")
    assert code == 1
    wrong = report["parts"]["vectors"]["kernels"]["OneWireBit"]
    assert wrong
    assert all(text.startswith("lm4 of") for text in wrong)


# The CUDA kernels themselves, on the emulator.


@pytest.mark.skipif(emulated.NVCC is None, reason=emulated.NO_NVCC)
def test_the_kernels_ptx_passes(tmp_path: Path) -> None:
    module = emulated.load(emulated.Build(arch=80))
    kernels.register("emulated", CudaKernels(module, "emulated"))
    options = ["--kernels", "emulated", "--codecs", "none,int8,int4:block=512,lm4,sign,topk:0.01"]
    code, report = run(tmp_path, *options, "--parts", "contract,layouts,damage,vectors")
    assert code == 0, report
    assert report["environment"]["kernels"] == "emulated"
    assert report["parts"]["contract"]["checks"] == 6 * (3 * 4 * 6 * 3 + 9 + 10)
