"""Small models under FSDP2, on the ranks of a test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import zcomm.fsdp
from ddp_training import batch, seeded
from zcomm import codec
from zcomm.engine.cpu import CpuRunner
from zcomm.engine.host import HostRunner, Turns

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
OFFLOAD = CPUOffloadPolicy(pin_memory=False)
# Since torch 2.13 an FSDP model can go on after a backward() that failed.
CAN_GO_ON = hasattr(FSDPModule, "reset_iter_state")
BF16_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Net(nn.Module):
    """Row counts that no number of ranks divides, a weight whose columns 2, 3 and 4 divide, and a
    last layer with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 281)
        self.middle = nn.Sequential(nn.Linear(281, 276), nn.Tanh(), nn.Linear(276, 127))
        self.last = nn.Linear(127, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


class Branches(Net):
    """A Net with a second branch in the same FSDP module; `other` selects it."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(127, 3)
        self.other = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x).tanh()).tanh()
        return self.spare(x) if self.other else self.last(x)


class AnyGradientDtype(Branches):
    """Uses both branches. Torch 2.15 moves the parameters whose gradients may have any dtype behind
    the others when it reduces; older versions leave them where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.last.bias.grad_dtype = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x).tanh()).tanh()
        return self.spare(x) + self.last(x)


class Checkpointed(Net):
    """Computes its layers again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False).tanh()
        return self.last(checkpoint(self.middle, x, use_reentrant=False).tanh())


def by_columns(p: nn.Parameter) -> Shard | None:
    """Shards a weight by columns where they divide evenly."""
    return Shard(1) if p.dim() == 2 and p.shape[1] % 12 == 0 else None


def mesh_of(count: int) -> DeviceMesh | None:
    """A mesh of the first `count` ranks; None on the others. All ranks call it."""
    mesh = DeviceMesh("cpu", list(range(count)))
    return mesh if dist.get_rank() < count else None


def mesh_2d() -> DeviceMesh:
    """Four ranks: two replicas of two shards."""
    return DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh | None, stage: int = 3, model: Any = Net, **options: Any) -> Any:
    """A model in four FSDP modules, one nested in another."""
    made = seeded(model)
    options |= {"mesh": mesh, "reshard_after_forward": stage == 3}
    for module in (made.first, made.middle[2], made.middle, made):
        fully_shard(module, **options)
    return made


class Outcome(NamedTuple):
    losses: list[float]
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def train(
    model: Any,
    rank: int,
    *,
    steps: int = 3,
    accumulate: int = 1,
    sync_each: bool = False,
    clip: float | None = None,
    lr: float = 0.5,
) -> Outcome:
    """Trains on this rank's own batches; without `sync_each`, only the last gradient of a step is
    reduced."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            last = part == accumulate - 1
            model.set_requires_gradient_sync(last or sync_each)
            loss = model(model_input(model, rank, step * accumulate + part)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        if clip is not None:
            losses.append(clip_grad_norm_(model.parameters(), clip).full_tensor().item())
        optimizer.step()
    return outcome(model, losses)


def model_input(model: Any, rank: int, step: int) -> Tensor:
    return batch(rank, step).to(next(model.parameters()).dtype)


def outcome(model: Any, losses: list[float]) -> Outcome:
    """The whole parameters and gradients, gathered from all ranks, which all call it."""
    named = dict(model.named_parameters())
    return Outcome(
        losses,
        {name: p.detach().full_tensor().clone() for name, p in named.items()},
        {name: None if p.grad is None else p.grad.full_tensor() for name, p in named.items()},
    )


def local_gradients(rank: int, step: int = 0, model: Any = Net) -> dict[str, Tensor]:
    """The gradients of the whole model on this rank's batch, before any reduction."""
    plain = seeded(model)
    plain(batch(rank, step)).float().square().mean().backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def expected_gradient(
    ranks: list[Tensor], spec: str, hosts: list[list[int]] | None = None
) -> Tensor:
    """Every rank's shard for every owner, or the sum of every host's ranks, encoded once and summed
    in rank order."""
    world_size, whole = len(ranks), ranks[0]
    rows = -(-whole.shape[0] // world_size)
    used = codec(spec if whole.numel() >= 100 else "none")
    sums = ranks if hosts is None else [sum(ranks[r] for r in sorted(row)) for row in hosts]
    shards = []
    for owner in zip(*(gradient.split(rows) for gradient in sums)):
        wires = [used.encode(shard.flatten(), prescale=1 / world_size) for shard in owner]
        shards.append(used.decode_sum(wires, owner[0].numel()))
    return torch.cat(shards).view_as(whole)


@contextmanager
def slow_engine() -> Iterator[None]:
    """Slows the engine down, so that code that does not wait for a result fails."""
    with ExitStack() as stack:
        for kind, name in ((CpuRunner, "_advance"), (HostRunner, "_run_native"), (Turns, "_sum")):
            stack.enter_context(_slow(kind, name))
        yield


@contextmanager
def _slow(kind: Any, name: str) -> Iterator[None]:
    original = getattr(kind, name)

    def slow(*args: Any, **how: Any) -> Any:
        time.sleep(0.01)
        return original(*args, **how)

    setattr(kind, name, slow)
    try:
        yield
    finally:
        setattr(kind, name, original)


class Watched(NamedTuple):
    """How the reduce-scatters of a model were scheduled."""

    handle: zcomm.fsdp.Handle
    deferred: set[bool]  # whether backward continued before they finished
    under_way: list[int]  # how many were pending when the next input was built


def watched(handle: zcomm.fsdp.Handle) -> Watched:
    compressor, found = handle._compressor, Watched(handle, set(), [])
    reduce, make_room = compressor.reduce, compressor.make_room

    def watched_reduce(*args: Any) -> None:
        reduce(*args)
        found.deferred.add(bool(compressor._reducing))

    def watched_room(module: Any) -> None:
        make_room(module)
        found.under_way.append(len(compressor._reducing))

    compressor.reduce, compressor.make_room = watched_reduce, watched_room
    return found


def compress(model: Any, **settings: Any) -> zcomm.fsdp.Handle:
    return zcomm.fsdp.compress(model, **{"codec": "lm4", "min_numel": 100, **settings})
