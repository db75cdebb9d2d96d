"""zcomm._cuda without a GPU, and its kernels, emulated, under the device engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import emulated
import zcomm
import zcomm.kernels
from kernel_sets import EMULATED
from ranks import run_ranks
from recorded_streams import device_engines
from zcomm import Layout, Segment, codec
from zcomm.kernels import cuda, device
from zcomm.kernels.base import segment_rows

MODULE = cuda.load()
WORLD_SIZE = 2
SPECS = ["int8", "lm4", "topk:0.05"]

needs_module = pytest.mark.skipif(isinstance(MODULE, str), reason=f"{MODULE}")
needs_emulator = pytest.mark.skipif(not EMULATED, reason=emulated.NO_NVCC)
no_driver = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_the_module_is_there_if_nvcc_is() -> None:
    """`make test` builds the wheel on this machine."""
    if emulated.NVCC and os.environ.get("ZCOMM_WHEEL") and os.environ.get("ZCOMM_CUDA") != "0":
        assert not isinstance(MODULE, str), MODULE


@needs_module
@no_driver
def test_without_a_driver_it_says_so() -> None:
    assert not isinstance(MODULE, str)
    assert MODULE.missing() == "no CUDA driver"
    assert zcomm.available_kernels()["cuda"] == "no CUDA driver"
    with pytest.raises(ValueError, match="kernels cuda: expected tensors on cuda, got cpu"):
        codec("lm4").encode(torch.ones(3), kernels="cuda")
    with pytest.raises(RuntimeError, match="kernels cuda are absent: no CUDA driver"):
        zcomm.kernels.select(torch.device("cuda"), "cuda")


@needs_module
@no_driver
def test_it_knows_what_it_was_built_for() -> None:
    assert not isinstance(MODULE, str)
    forced = re.findall(r"\d+", os.environ.get("ZCOMM_CUDA_ARCHS", ""))
    assert ([int(arch) for arch in forced] or [75, 80, 90, 100, 120]) == MODULE.ARCHS
    with pytest.raises(RuntimeError, match="expected a CUDA device 0, got cudaErrorInsufficient"):
        MODULE.capability(0)


@needs_module
@no_driver
def test_a_launch_without_a_driver_is_an_error() -> None:
    assert not isinstance(MODULE, str)
    layout = Layout([Segment(codec("lm4"), 300)])
    plan = MODULE.Plan(segment_rows(layout), layout.frames)
    assert len(plan.tables) > 0
    with pytest.raises(RuntimeError, match="expected the device to take a launch, got cuda"):
        MODULE.decode_sum(plan, 0, 0, [0], 0, 0, True, 0, 0)


@needs_module
@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_it_needs_no_library_of_cuda_or_torch() -> None:
    assert not isinstance(MODULE, str)
    assert MODULE.__file__ is not None
    shown = subprocess.run(
        ["readelf", "-d", MODULE.__file__], capture_output=True, text=True, check=True
    ).stdout
    needed = [line for line in shown.splitlines() if "NEEDED" in line]
    assert needed
    assert not [line for line in needed if any(w in line for w in ("cuda", "torch", "c10"))]


@needs_emulator
def test_more_wires_than_fit_a_kernels_arguments() -> None:
    c, n, count = codec("int4"), 700, 70
    g = torch.Generator().manual_seed(0)
    wires = [c.encode(torch.randn(n, generator=g)) for _ in range(count)]
    expected = c.decode_sum(wires, n)
    for kernels in EMULATED:
        assert torch.equal(c.decode_sum(wires, n, kernels=kernels), expected)
        with pytest.raises(ValueError, match="expected at most 4096 wires, got 4097"):
            c.decode_sum([wires[0]] * 4097, n, kernels=kernels)


@needs_emulator
def test_a_fault_is_left_on_the_device_if_asked_for() -> None:
    """The lowest of all calls' faults stays; nothing is raised until it is read."""
    layout = Layout([Segment(codec("lm4"), 1000)])
    good = layout.encode(torch.randn(1000, generator=torch.Generator().manual_seed(1)))
    bad = good.clone()
    bad[100] ^= 1
    for kernels in EMULATED:
        faults = device.new_faults(torch.device("cpu"))
        layout.decode_sum([good, good], kernels=kernels, faults=faults)
        assert faults.item() == device.NO_FAULT
        layout.decode_sum([good, good, bad], kernels=kernels, faults=faults)
        layout.decode_sum([good, bad], kernels=kernels, faults=faults)
        layout.decode_sum([good], kernels=kernels, faults=faults)
        error = device.fault_error(int(faults.item()), layout)
        assert error.wire_index == 1
        assert str(error) == "wire 1: expected a checksum that fits the bytes, got another"


def train(rank: int, spec: str) -> dict[str, Any]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(60, 90), nn.Tanh(), nn.Linear(90, 7)))
    handle = zcomm.compress(ddp, codec=spec, feedback=True, min_numel=100)
    torch.manual_seed(rank)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.randn(8, 60)).square().mean().backward()
    state = handle.state_dict()["residuals"]
    handle.close()
    gradients = {name: p.grad for name, p in ddp.named_parameters()}
    return {"gradients": gradients, "sent": state["sent"], "owned": state["owned"]}


def train_on(rank: int, world_size: int, path: Path) -> list[tuple[Any, Any]]:
    """Results for each codec: with the CPU's kernels and engine, then with the emulated ones."""
    found = []
    module = emulated.load_file(path)
    zcomm.kernels.register("emulated", cuda.CudaKernels(module, "emulated"))
    for spec in SPECS:
        cpu = train(rank, spec)
        os.environ["ZCOMM_KERNELS"] = "emulated"
        zcomm.kernels.register("emulated", cuda.CudaKernels(module, "emulated"))  # forgets choices
        with device_engines():
            found.append((cpu, train(rank, spec)))
        del os.environ["ZCOMM_KERNELS"]
        zcomm.kernels.register("emulated", cuda.CudaKernels(module, "emulated"))
    dist.barrier()
    return found


@needs_emulator
def test_training_with_them_gives_the_bits_of_the_cpu() -> None:
    """Gradients and residuals of DDP on two ranks, with the device engine and the kernels' PTX."""
    path = emulated.build_module(emulated.Build(80))
    for found in run_ranks(WORLD_SIZE, train_on, path):
        for spec, (expected, got) in zip(SPECS, found):
            for part, tensors in expected.items():
                for name, t in tensors.items():
                    assert torch.equal(got[part][name], t), (spec, part, name)
