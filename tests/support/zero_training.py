"""Small models under DDP, trained by a plain optimizer or by zcomm.ZeroOptimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import zcomm
from ddp_training import Net, OddShapes, batch, seeded
from everyones import everyones

# What fp32 rounding may change in 50 steps of lr 1e-3.
ROUNDING = 1e-6

Make = Callable[..., Any]  # an optimizer of a DDP model
Model = Callable[[], nn.Module]


def among(count: int) -> Any:
    """The process group of the first ranks; None for the others. A collective call."""
    group = dist.new_group(range(count))
    return group if dist.get_rank() < count else None


class Assorted(OddShapes):
    """Odd shapes, and tied and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 70), nn.Linear(32, 70)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.frozen = nn.Linear(70, 70).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.first(x).tanh() * self.second(2 * x).tanh()) + super().forward(x)


def channels_last() -> nn.Module:
    layers = nn.Conv2d(8, 40, 3), nn.BatchNorm2d(40), nn.ReLU(), nn.Conv2d(40, 16, 3), nn.Flatten()
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def wrapped(model: Model = Net, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(seeded(model), **options)


def plain(optimizer: type[Optimizer], **options: Any) -> Make:
    """Makes the optimizer as without zcomm."""
    return lambda ddp, params=None: optimizer(
        trainable(ddp) if params is None else params, **options
    )


def zero(optimizer: type[Optimizer], codec: Any = "none", **options: Any) -> Make:
    return lambda ddp, params=None: zcomm.ZeroOptimizer(ddp, optimizer, params, codec, **options)


def trainable(ddp: nn.Module) -> list[nn.Parameter]:
    return [p for p in ddp.parameters() if p.requires_grad]


def backward(model: Any, rank: int, step: int, shape: tuple[int, ...] = (8, 32)) -> None:
    model(batch(rank, step, *shape)).float().square().mean().backward()


def clip(ddp: nn.Module, opt: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
    if isinstance(opt, zcomm.ZeroOptimizer):
        return opt.clip_grad_norm_(max_norm, norm_type)
    return nn.utils.clip_grad_norm_(ddp.parameters(), max_norm, norm_type)


def train(
    ddp: DistributedDataParallel,
    opt: Any,
    rank: int,
    *,
    steps: int = 6,
    accumulate: int = 1,
    synchronised: bool = False,
    shape: tuple[int, ...] = (8, 32),
    set_to_none: bool = True,
    zero_grad: str = "opt",  # "ddp"; "late": after the first forward
    max_norm: float | None = None,
    scheduler: Callable[[Any], Any] | None = None,
    before_step: Callable[[Any, int, int], None] | None = None,
) -> None:
    """Steps on batches of this rank's own; the same for a plain optimizer and ours."""
    schedule = scheduler(opt) if scheduler else None
    for step in range(steps):
        if before_step:
            before_step(ddp.module, rank, step)
        if zero_grad == "late":
            loss = ddp(batch(rank, step, *shape)).float().square().mean()
            opt.zero_grad(set_to_none)
            loss.backward()
        else:
            (ddp if zero_grad == "ddp" else opt).zero_grad(set_to_none)
            for part in range(accumulate):
                alone = part < accumulate - 1 and not synchronised
                with ddp.no_sync() if alone else nullcontext():
                    backward(ddp, rank, step * accumulate + part, shape)
        if max_norm is not None:
            clip(ddp, opt, max_norm)
        opt.step()
        if schedule:
            schedule.step()


def parameters(ddp: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in ddp.named_parameters()}


def trained(make: Make, rank: int, model: Model = Net, ddp: Any = None, **training: Any) -> Any:
    """The parameters after train()."""
    wrapper = wrapped(model, **(ddp or {}))
    opt = make(wrapper)
    train(wrapper, opt, rank, **training)
    close(opt)
    return parameters(wrapper)


def close(opt: Any) -> None:
    if isinstance(opt, zcomm.ZeroOptimizer):
        opt.close()


def difference(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest of any element, as an absolute value; 0: the same, bit for bit."""
    assert some.keys() == others.keys()
    if all(torch.equal(some[name], others[name]) for name in some):
        return 0.0
    worst = max(_largest(some[name].double() - others[name].double()) for name in some)
    return worst or float("nan")


def _largest(t: Tensor) -> float:
    return t.abs().max().item() if t.numel() else 0.0


def plain_and_zero(
    rank: int, optimizer: type[Optimizer], options: dict[str, Any], **training: Any
) -> float:
    """The difference that ZeroOptimizer makes to a training with plain DDP."""
    found = [trained(make(optimizer, **options), rank, **training) for make in (plain, zero)]
    assert all(t.isfinite().all() for t in found[0].values())
    return difference(*found)


def spread(ddp: DistributedDataParallel) -> float:
    """The largest difference of the parameters between ranks: a collective call."""
    first, *others = everyones(parameters(ddp), ddp.process_group)
    return max((difference(first, other) for other in others), default=0.0)


def masters(opt: zcomm.ZeroOptimizer) -> dict[str, Tensor]:
    """What the owners hold of each parameter, put together: a collective call."""
    mine = {name: shard.tensor.detach() for name, shard in opt.shards.items()}
    ranks = everyones(mine)
    return {name: torch.cat([theirs[name] for theirs in ranks]) for name in mine}


def lag(ddp: nn.Module, opt: zcomm.ZeroOptimizer) -> float:
    """How far the parameters are from what their owners hold: a collective call."""
    named = {n.removeprefix("module."): p for n, p in parameters(ddp).items()}
    truth = masters(opt)
    return difference({n: named[n].flatten() for n in truth}, truth)
