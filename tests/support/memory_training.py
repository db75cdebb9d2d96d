"""Trainings whose memory is measured: by an allocator that counts, not by zcomm's own books."""

from __future__ import annotations

import ctypes
import gc
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zcomm
from zcomm import _core

LAYERS, SIDE = 20, 400
STEPS = 4  # DDP arranges its buckets anew in the second
BUCKET_CAP_MB = 1


def build_counter(folder: Path) -> Path | None:
    """A library for LD_PRELOAD, see counted_tensors.c; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library, source = folder / "counted_tensors.so", Path(__file__).with_name("counted_tensors.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


class _Used(torch.autograd.Function):
    """Makes a gradient, and nothing else that takes memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        return grads[0], torch.full_like(weight, 0.01).addcmul_(weight, grads[0])


class Layers(nn.Module):
    """3.2M parameters without activations; every second layer has a bias to keep uncompressed."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(SIDE, SIDE, dtype=dtype) for _ in range(LAYERS))
        self.biases = nn.ParameterList(torch.randn(SIDE, dtype=dtype) for _ in range(LAYERS // 2))

    def forward(self, x: Tensor) -> Tensor:
        for i, weight in enumerate(self.weights):
            x = _Used.apply(x, weight)
            if i % 2:
                x = _Used.apply(x, self.biases[i // 2])
        return x


class Measured(NamedTuple):
    total: int
    peak: int


class Case(NamedTuple):
    """The arguments of a training and of its plan."""

    stage: int
    codec: str | None
    optimizer: str
    dtype: str = "float32"
    scaler: bool = False
    ddp: dict[str, Any] = {}  # noqa: RUF012
    options: dict[str, Any] = {}  # noqa: RUF012

    def planned(
        self, world_size: int, rank: int | None = None, one_host: bool = True
    ) -> zcomm.MemoryPlan:
        model = Layers(getattr(torch, self.dtype))
        return zcomm.plan(
            model,
            world_size,
            stage=self.stage,
            codec=self.codec,
            optimizer=self.optimizer,
            scaler=self.scaler,
            rank=rank,
            one_host=one_host,
            **{"bucket_cap_mb": BUCKET_CAP_MB, **self.ddp},
            **_options(self.options),
        )


def measure(rank: int, world_size: int, case: Case) -> Measured:
    """Runs on every rank: bytes between steps, and the most since before the model was made."""
    counter = ctypes.CDLL(None)
    counter.tensors_now.restype = counter.tensors_most.restype = ctypes.c_longlong
    _collect()
    tensors, (native, most_native) = counter.tensors_now(), _core.allocated_nbytes()
    training = _Training(case)
    counter.tensors_forget_most()
    for _ in range(STEPS):
        training.step()
    _collect()
    native_now, native_most = _core.allocated_nbytes()
    peak = counter.tensors_most() - tensors
    # The native core's maximum is that of the process: only a new one is this training's.
    peak += (native_most if native_most > most_native else native_now) - native
    total = counter.tensors_now() - tensors + native_now - native
    shared = _own_segments_nbytes()
    training.close()
    return Measured(total + shared, peak + shared)


def _own_segments_nbytes() -> int:
    """What this rank shares with its peers: it alone may write it."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = [m[0].split("-") for m in maps if m[1] == "rw-s" and "memfd:zcomm" in " ".join(m)]
    return sum(int(end, 16) - int(start, 16) for start, end in ends)


def _collect() -> None:
    # What DDP's C++ side holds is let go by one collection, what hangs on that by the next.
    for _ in range(3):
        gc.collect()


class _Training:
    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.model = Layers(getattr(torch, case.dtype))
        self.ddp = DistributedDataParallel(
            self.model, **{"bucket_cap_mb": BUCKET_CAP_MB, **case.ddp}
        )
        self.scaler = torch.amp.GradScaler("cpu") if case.scaler else None
        self.x = torch.ones(1, dtype=getattr(torch, case.dtype), requires_grad=True)
        kind = getattr(torch.optim, case.optimizer)
        options = _options(case.options)
        self.handle: Any = None
        self.optimizer: Any
        if case.stage == 1:
            self.optimizer = zcomm.ZeroOptimizer(
                self.ddp, kind, codec=case.codec, scaler=self.scaler, **options
            )
            self.handle = self.optimizer.handle
            return
        names = zcomm.sharding.settings.SETTING_NAMES
        settings = {name: options.pop(name) for name in names if name in options}
        self.optimizer = kind(self.model.parameters(), **options)
        if case.codec is not None:
            self.handle = zcomm.compress(self.ddp, case.codec, scaler=self.scaler, **settings)

    def step(self) -> None:
        loss = self.ddp(self.x).sum()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.x.grad = None

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Dtypes are given by their names: cases travel to the ranks as they are printed."""
    return {k: getattr(torch, v) if k.endswith("dtype") else v for k, v in options.items()}
