"""Training loops around ZeroOptimizer that are unusual, or wrong: what the ranks of a test run."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import zcomm
from ddp_training import Net, seeded
from raised import Raised, raised
from zero_training import (
    Make,
    backward,
    difference,
    parameters,
    plain,
    train,
    trainable,
    wrapped,
    zero,
)

IMAGES = (4, 8, 7, 7)


class Counting(Optimizer):
    """SGD whose steps shrink with a number that it keeps in its groups."""

    def __init__(self, params: Any, lr: float = 1e-3, k: int = 0) -> None:
        super().__init__(params, {"lr": lr, "k": k})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["k"])


class Patient(Optimizer):
    """SGD with an argument that has no default and is no option of a group."""

    def __init__(self, params: Any, horizon: float, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self.horizon = horizon

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / self.horizon)


class Normalised(Optimizer):
    """SGD with the gradients of a group divided by the norm of all of them."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            norm = float(nn.utils.get_total_norm(grads)) + 1e-8
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / norm)


# Loops that are right: what plain DDP does.


def both(loop: Callable[[Make], Any]) -> float:
    """The difference between the parameters that a loop gives with plain DDP and with zcomm."""
    return difference(parameters(loop(plain)), parameters(loop(zero)))


def drop_an_accumulation(rank: int, world_size: int, views: bool) -> float:
    """zero_grad() in the middle of an accumulation, as after a loss of NaN."""

    def loop(kind: Make) -> Any:
        ddp = wrapped(Net, gradient_as_bucket_view=views)
        opt = kind(SGD, lr=0.1)(ddp)
        for step in range(0, 6, 3):
            backward(ddp, rank, step)
            with ddp.no_sync():
                backward(ddp, rank, step + 1)
            opt.zero_grad()
            backward(ddp, rank, step + 2)
            opt.step()
        return ddp

    return both(loop)


def count_in_groups(rank: int, world_size: int) -> tuple[float, list[int]]:
    counts = []

    def loop(kind: Make) -> Any:
        ddp = wrapped(Net)
        opt = kind(Counting, lr=0.1)(ddp)
        train(ddp, opt, rank, steps=4)
        counts.append(opt.param_groups[0]["k"])
        return ddp

    return both(loop), counts


def require_an_argument(rank: int, world_size: int) -> float:
    def loop(kind: Make) -> Any:
        ddp = wrapped(Net)
        train(ddp, kind(Patient, horizon=4.0, lr=0.1)(ddp), rank, steps=3)
        return ddp

    return both(loop)


def share_memory(rank: int, world_size: int) -> tuple[float, Raised]:
    """As torch.multiprocessing does to weights that are sent: their storage moves in place."""
    refusals = []

    def loop(kind: Make) -> Any:
        ddp = wrapped(Net)
        opt = kind(SGD, lr=0.1)(ddp)
        train(ddp, opt, rank, steps=2)
        if kind is zero:
            refusals.append(raised(ddp.module.share_memory))
        opt.zero_grad()
        ddp.module.share_memory()
        train(ddp, opt, rank, steps=2)
        return ddp

    return both(loop), refusals[0]


def write_data(rank: int, world_size: int) -> float:
    """Writes to p.data, which only reload_parameters() can know of."""

    def loop(kind: Make) -> Any:
        ddp = wrapped(Net)
        opt = (kind(SGD, param_codec="lm4", lr=0.1) if kind is zero else kind(SGD, lr=0.1))(ddp)
        train(ddp, opt, rank, steps=2)
        for p in trainable(ddp):
            p.data.copy_(torch.linspace(-0.1, 0.1, p.numel()).view(p.shape))
        if kind is zero:
            opt.reload_parameters()
        train(ddp, opt, rank, steps=1)
        if kind is zero:
            opt.sync_parameters()
        return ddp

    return both(loop)


def set_momentum_later(rank: int, world_size: int) -> Any:
    """Momentum of a plain optimizer, of the consolidated state, and of this rank's own."""
    states: list[Any] = []

    def loop(kind: Make) -> Any:
        ddp = wrapped(Net)
        opt = kind(SGD, lr=0.1)(ddp)
        train(ddp, opt, rank, steps=1)
        opt.param_groups[0]["momentum"] = 0.9
        train(ddp, opt, rank, steps=3)
        states.append(opt.state_dict()["state"])
        if kind is zero:
            states.append(opt.consolidated_state_dict())
        return ddp

    moved = both(loop)
    expected, sharded, whole = states
    runs = {name: held["momentum_buffer"].part() for name, held in sharded.items()}
    return moved, expected, whole and whole["state"], runs


def copy_model(rank: int, world_size: int) -> dict[str, Any]:
    """Copies of a DDP model whose gradients are views of its buckets."""
    ddp = wrapped(Net, gradient_as_bucket_view=True)
    opt = zero(SGD, lr=0.1)(ddp)
    copies = [copy.deepcopy(ddp)]
    train(ddp, opt, rank, steps=1)
    copies.append(copy.deepcopy(ddp))
    kinds = []
    for one in copies:
        backward(one, rank, 0)
        kinds += [type(p.grad).__name__ for p in trainable(one)]
    refused = wrapped(Net, gradient_as_bucket_view=True)
    foreign = nn.Parameter(torch.zeros(5))
    return {
        "gradients": set(kinds),
        "copied": difference(parameters(copies[1]), parameters(ddp)),
        "optimizer": [raised(act, opt) for act in (copy.deepcopy, copy.copy, pickle.dumps, save)],
        "module": raised(save, ddp.module),
        "foreign": raised(zcomm.ZeroOptimizer, refused, SGD, [*trainable(refused), foreign]),
        "hooks": len(refused._forward_pre_hooks) + len(refused._forward_hooks),
    }


def save(saved: Any) -> None:
    torch.save(saved, io.BytesIO())


# Loops that are wrong.


def touch_gradients(rank: int, world_size: int) -> tuple[dict[str, Raised], float]:
    """What p.grad refuses; the step afterwards is as if nothing had happened."""
    refused = {}

    def loop(kind: Make) -> Any:
        ddp = wrapped(Net)
        opt = kind(SGD, lr=0.1)(ddp)
        backward(ddp, rank, 0)
        p = ddp.module.middle.weight
        x = torch.ones_like(p)
        if kind is zero:
            refused["copy to"] = raised(p.grad.copy_, x)
            refused["copy from"] = raised(x.copy_, p.grad)
            refused["out"] = raised(torch.mul, x, x, out=p.grad)
            refused["alpha"] = raised(p.grad.add_, x, alpha=0.5)
        opt.step()
        return ddp

    moved = both(loop)
    return refused, moved


def local_full_grad(ddp: Any, opt: Any, rank: int) -> None:
    with ddp.no_sync():
        backward(ddp, rank, 1)
    opt.full_grad(ddp.module.middle.weight)


def other_lr(ddp: Any, opt: Any, rank: int) -> None:
    opt.param_groups[0]["lr"] = 0.125 * (rank + 1)
    train(ddp, opt, rank, steps=1)


def no_gradient_on_rank_0(ddp: Any, opt: Any, rank: int) -> None:
    backward(ddp, rank, 1)
    if rank == 0:
        ddp.module.middle.weight.grad = None
    opt.step()


WRONG_LOOPS = {
    "full_grad of a local gradient": local_full_grad,
    "lr differs": other_lr,
    "a gradient on one rank": no_gradient_on_rank_0,
}


def wrong_loops(rank: int, world_size: int) -> dict[str, Raised]:
    found = {}
    for name, loop in WRONG_LOOPS.items():
        ddp = wrapped(Net)
        opt = zero(SGD, lr=0.1, timeout_s=20.0)(ddp)
        train(ddp, opt, rank, steps=1)
        opt.zero_grad()
        found[name] = raised(loop, ddp, opt, rank)
    found["group norm"] = raised(zcomm.ZeroOptimizer, wrapped(Net), Normalised)
    return found


def unfreeze(rank: int, world_size: int) -> list[Raised]:
    model = seeded(Net)
    model.last.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    opt = zero(SGD, lr=0.1)(ddp, list(ddp.parameters()))
    train(ddp, opt, rank, steps=1)
    model.last.requires_grad_(True)
    opt.zero_grad()
    return [raised(backward, ddp, rank, 1), raised(opt.step)]


def compile_step(rank: int, world_size: int) -> tuple[float, int]:
    """What torch.compile makes of step(): the same, and no graph."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def loop(kind: Make) -> Any:
        ddp = wrapped(Net)
        opt = kind(SGD, lr=0.1)(ddp)
        step = torch.compile(opt.step, backend=backend) if kind is zero else opt.step
        for number in range(3):
            opt.zero_grad()
            backward(ddp, rank, number)
            step()
        return ddp

    return both(loop), len(graphs)


def change_memory_format(rank: int, world_size: int) -> Raised:
    ddp = wrapped(lambda: nn.Sequential(nn.Conv2d(8, 40, 3), nn.Conv2d(40, 16, 3)))
    opt = zero(AdamW)(ddp)
    train(ddp, opt, rank, steps=1, shape=IMAGES)
    opt.zero_grad()
    ddp.to(memory_format=torch.channels_last)
    backward(ddp, rank, 1, IMAGES)
    return raised(opt.step)
