"""A user's script, for mypy --strict: every public name, and the types of what comes back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zcomm
import zcomm.monitor


def train(ddp: DistributedDataParallel, writer: Any) -> float:
    handle: zcomm.Handle = zcomm.compress(ddp, codec={"*.bias": "none", "*": "lm4"}, verify=True)
    zcomm.monitor.Log(handle, every=10)
    zcomm.monitor.Callback(handle, lambda sample: print(sample.step))
    with zcomm.monitor.TensorBoard(handle, writer):
        loss: Tensor = ddp(torch.randn(8, 64)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
    stats: zcomm.Stats = handle.stats()
    handle.load_state_dict(handle.state_dict())
    handle.close()
    return stats.ratio + stats.exposed_s


def train_sharded(ddp: DistributedDataParallel, folder: str) -> int:
    opt = zcomm.ZeroOptimizer(ddp, torch.optim.AdamW, codec="lm4", param_codec="lm4", lr=1e-3)
    state = {"model": ddp.module, "optimizer": opt, "epoch": {"number": 0}}
    start: int | None = zcomm.load_checkpoint(folder, state)
    opt.zero_grad()
    norm: Tensor = opt.clip_grad_norm_(1.0)
    opt.step()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)
    schedule.step()
    zcomm.save_checkpoint(folder, state, step=(start or 0) + 1, keep=2)
    print(norm.item(), opt.handle.stats().steps)
    return opt.handle.residual_nbytes()


def send(x: Tensor, feedback: zcomm.Feedback) -> Tensor:
    zcomm.all_reduce(x, codec="sign", feedback=feedback)
    work: zcomm.Work | None = zcomm.all_reduce(x, codec="int8", async_op=True, op="sum")
    if work is not None:
        work.wait()
    gathered = torch.empty(x.numel() * dist.get_world_size())
    zcomm.all_gather(gathered, x)
    zcomm.reduce_scatter(x, gathered)
    return gathered


def encode(x: Tensor) -> Tensor:
    c: zcomm.Codec = zcomm.codec("int4:block=64")
    residual = c.new_residual(x.numel(), torch.bfloat16)
    wire: Tensor = c.encode(x, residual, prescale=0.5)
    assert wire.numel() == c.wire_nbytes(x.numel())
    try:
        return c.decode_sum([wire, wire], x.numel())
    except zcomm.WireError as error:
        print(error.wire_index)
        raise


def look() -> str:
    settings = zcomm.Settings(codec="topk:0.01", feedback=0.8, residual_dtype="bf16")
    memory: zcomm.MemoryPlan = zcomm.plan(7e9, world_size=64, stage=1, dtype="bf16")
    nbytes: int = memory.peak
    absent: list[str] = [why for why in zcomm.available_kernels().values() if why]
    state = zcomm.HookState(codec="lm4", chunk_mb=1.0)
    DistributedDataParallel(nn.Linear(4, 4)).register_comm_hook(state, zcomm.hook)
    return f"{zcomm.__version__} {settings.codec} {nbytes} {absent} {zcomm.CommunicationError}"
