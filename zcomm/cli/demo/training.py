"""What the demo runs on its ranks: one GPT, trained in several variants that take turns.

All variants start with the same weights and see the same batches. Turns are a few steps long, so
that other load on the machine slows all variants alike.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import zcomm
from zcomm.cli.demo import gpt
from zcomm.launch import hosts
from zcomm.report.progress import Progress, Standing

# 7.2M parameters and few tokens: at 1 Gbit/s, sending fp32 gradients takes longer than computing.
MODEL = {"layers": 4, "width": 384, "heads": 6, "context": 64}
BATCH = 2  # windows per rank and step
PEAK_LR, WARMUP_STEPS, BETAS, WEIGHT_DECAY, CLIP = 1e-3, 20, (0.9, 0.99), 0.1, 1.0
HELD_OUT_WINDOWS = 128
# DDP's default of 25 MB would put nearly the whole model in one bucket: nothing would overlap.
BUCKET_CAP_MB = 4
TURN_STEPS = 4
# Within the warm-up, where the learning rate does not depend on the total number of steps.
CALIBRATION_STEPS = 3 * TURN_STEPS
LEAST_STEPS = 2 * CALIBRATION_STEPS
SHOWN_STEPS = 8  # progress shows means over these


@dataclass(frozen=True)
class Variant:
    """A name and codecs; with `param_codec` it is ZeRO."""

    name: str
    codec: str | None = None
    param_codec: str | None = None


VARIANTS = (
    Variant("DDP fp32"),
    Variant("DDP + int8", "int8"),
    Variant("DDP + lm4", "lm4"),
    Variant("ZeRO + lm4 both ways", "lm4", "lm4"),
)


@dataclass(frozen=True)
class Length:
    """How long to train: a number of steps, or until a time on the monotonic clock."""

    steps: int | None
    end: float


@dataclass(frozen=True)
class Outcome:
    """One variant on one rank. Per step: the mean loss, and the seconds of the slowest rank."""

    losses: list[float]
    seconds: list[float]
    sent: list[float]  # per turn: bytes per step at the interface, mean of the ranks
    held_out: float
    optimizer_nbytes: int
    digest: str  # of all parameters, as trained and after an exact gather


def train(rank: int, world_size: int, length: Length) -> list[Outcome]:
    text = gpt.standard_library()
    trainings = [Training(variant, rank) for variant in VARIANTS]
    progress = Progress([variant.name for variant in VARIANTS], sys.stderr) if rank == 0 else None
    steps = length.steps
    done, first_turns_end = 0, math.nan
    while done < (steps or CALIBRATION_STEPS):
        turn = min(TURN_STEPS, (steps or CALIBRATION_STEPS) - done)
        for training in trainings:
            training.take_turn(text.train, turn, steps or LEAST_STEPS)
            if progress:
                all_done = min(len(one.losses) for one in trainings)
                progress.show(all_done, steps, [one.standing() for one in trainings])
        done += turn
        if done == TURN_STEPS:  # slow: DDP rebuilds its buckets
            first_turns_end = time.monotonic()
        if steps is None and done == CALIBRATION_STEPS:
            step_s = (time.monotonic() - first_turns_end) / (done - TURN_STEPS)
            steps = affordable_steps(done, step_s, length.end)
    return [training.outcome(text.held_out) for training in trainings]


def affordable_steps(done: int, step_s: float, end: float) -> int:
    """How many steps there is time for, by rank 0's clock. `step_s`: one step of all variants."""
    # A forward pass takes about a third of the computation of a step.
    held_out_s = step_s * HELD_OUT_WINDOWS / dist.get_world_size() / BATCH / 3
    affordable = torch.tensor(done + (end - time.monotonic() - held_out_s) / step_s)
    dist.broadcast(affordable, src=0)
    return max(LEAST_STEPS, int(affordable))


class Training:
    """One variant on one rank."""

    def __init__(self, variant: Variant, rank: int) -> None:
        torch.manual_seed(0)
        self.model = gpt.GPT(**MODEL)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=BUCKET_CAP_MB)
        self.optimizer, self.handle = optimizer_of(variant, self.ddp)
        self.batches = torch.Generator().manual_seed(1 + rank)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.sent: list[float] = []

    def take_turn(self, tokens: Tensor, steps: int, all_steps: int) -> None:
        sent = hosts.sent_bytes()
        dist.barrier()
        losses, seconds = [], []
        for step in range(len(self.losses), len(self.losses) + steps):
            start = time.perf_counter()
            losses.append(self.step(tokens, PEAK_LR * lr_factor(step, all_steps)))
            seconds.append(time.perf_counter() - start)
        dist.barrier()
        sent = (hosts.sent_bytes() - sent) / steps
        by_rank = gathered(torch.tensor([*losses, *seconds, sent], dtype=torch.float64))
        self.losses += by_rank.mean(0)[:steps].tolist()
        self.seconds += by_rank.amax(0)[steps:-1].tolist()
        self.sent.append(by_rank.mean(0)[-1].item())

    def step(self, tokens: Tensor, lr: float) -> float:
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = lr
        loss = self.ddp(*gpt.random_windows(tokens, BATCH, self.model.context, self.batches))
        loss.backward()
        if isinstance(self.optimizer, zcomm.ZeroOptimizer):
            self.optimizer.clip_grad_norm_(CLIP)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def standing(self) -> Standing | None:
        """For the progress display; None before the first turn."""
        if not self.losses:
            return None
        losses, seconds = self.losses[-SHOWN_STEPS:], self.seconds[-SHOWN_STEPS:]
        tokens = len(seconds) * tokens_per_step(dist.get_world_size())
        return Standing(sum(losses) / len(losses), tokens / sum(seconds))

    def outcome(self, held_out: Tensor) -> Outcome:
        """Ends the training."""
        digest = hashlib.sha256()
        add_parameters(digest, self.model)
        if isinstance(self.optimizer, zcomm.ZeroOptimizer):
            self.optimizer.sync_parameters()
            add_parameters(digest, self.model)
        if self.handle is not None:
            self.handle.close()
        return Outcome(
            self.losses,
            self.seconds,
            self.sent,
            held_out_loss(self.model, held_out),
            state_nbytes(self.optimizer),
            digest.hexdigest(),
        )


def optimizer_of(
    variant: Variant, ddp: DistributedDataParallel
) -> tuple[torch.optim.Optimizer, zcomm.Handle | None]:
    adamw: dict[str, Any] = {"betas": BETAS, "weight_decay": WEIGHT_DECAY, "fused": True}
    if variant.codec and variant.param_codec:
        zero = zcomm.ZeroOptimizer(
            ddp, torch.optim.AdamW, codec=variant.codec, param_codec=variant.param_codec, **adamw
        )
        return zero, zero.handle
    handle = zcomm.compress(ddp, codec=variant.codec) if variant.codec else None
    return torch.optim.AdamW(ddp.parameters(), **adamw), handle


def lr_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine from 1 to 0.05."""
    done = max(0, step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return min((step + 1) / WARMUP_STEPS, 0.525 + 0.475 * math.cos(math.pi * done))


@torch.no_grad()
def held_out_loss(model: gpt.GPT, tokens: Tensor) -> float:
    """Over fixed windows, spread evenly over the text; each rank takes its share."""
    starts = torch.linspace(0, tokens.numel() - model.context - 1, HELD_OUT_WINDOWS).long()
    share = starts[dist.get_rank() :: dist.get_world_size()].chunk(4)
    losses = [model(*gpt.windows_at(tokens, part, model.context)) for part in share]
    return gathered(torch.stack(losses).mean()).mean().item()


def gathered(mine: Tensor) -> Tensor:
    """A row from each rank."""
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return torch.stack(rows)


def state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    local = optimizer.inner if isinstance(optimizer, zcomm.ZeroOptimizer) else optimizer
    tensors = (value for state in local.state.values() for value in state.values())
    return sum(value.nbytes for value in tensors if isinstance(value, Tensor))


def add_parameters(digest: hashlib._Hash, model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        whole = parameter.detach().contiguous()
        digest.update(ctypes.string_at(whole.data_ptr(), whole.nbytes))


def tokens_per_step(world_size: int) -> int:
    return world_size * BATCH * MODEL["context"]


def parameter_count() -> int:
    with torch.device("meta"):
        model = gpt.GPT(**MODEL)
    return sum(parameter.numel() for parameter in model.parameters())
