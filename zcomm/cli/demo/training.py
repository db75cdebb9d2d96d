"""What the demo runs on its ranks: one GPT, trained in several ways that take turns.

All ways have the same initial weights and batches. They take turns of a few steps, so that whatever
else the machine does slows all of them alike.
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

# 7.2M parameters and few tokens: at 1 Gbit/s, fp32 gradients take longer than the arithmetic.
MODEL = {"layers": 4, "width": 384, "heads": 6, "context": 64}
BATCH = 2  # windows per rank and step
PEAK_LR, WARMUP_STEPS, BETAS, WEIGHT_DECAY, CLIP = 1e-3, 20, (0.9, 0.99), 0.1, 1.0
HELD_OUT_WINDOWS = 128
# DDP's own 25 MB would be one bucket with nearly all of the model, and nothing would overlap.
BUCKET_CAP_MB = 4
TURN_STEPS = 4
# Within the warm-up, where the learning rate does not depend on the number of steps.
CALIBRATION_STEPS = 3 * TURN_STEPS
LEAST_STEPS = 2 * CALIBRATION_STEPS
SHOWN_STEPS = 8  # the loss and speed that are shown on the way are means of these


@dataclass(frozen=True)
class Way:
    """How the ranks agree on gradients and parameters; with `param_codec` it is ZeRO."""

    name: str
    codec: str | None = None
    param_codec: str | None = None


WAYS = (
    Way("DDP fp32"),
    Way("DDP + int8", "int8"),
    Way("DDP + lm4", "lm4"),
    Way("ZeRO + lm4 both ways", "lm4", "lm4"),
)


@dataclass(frozen=True)
class Length:
    """How long to train: a number of steps, or until a time of the system's monotonic clock."""

    steps: int | None
    end: float


@dataclass(frozen=True)
class Outcome:
    """One way on one rank. Of each step: the mean loss, and the seconds of the slowest rank."""

    losses: list[float]
    seconds: list[float]
    sent: list[float]  # bytes per step at a rank's interface, of each turn, mean of the ranks
    held_out: float
    optimizer_nbytes: int
    digest: str  # of all parameters, as they were trained and after they were gathered exactly


def train(rank: int, world_size: int, length: Length) -> list[Outcome]:
    text = gpt.standard_library()
    trainings = [Training(way, rank) for way in WAYS]
    progress = Progress([way.name for way in WAYS], sys.stderr) if rank == 0 else None
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
        if done == TURN_STEPS:  # slow ones: DDP arranges its buckets
            first_turns_end = time.monotonic()
        if steps is None and done == CALIBRATION_STEPS:
            step_s = (time.monotonic() - first_turns_end) / (done - TURN_STEPS)
            steps = affordable_steps(done, step_s, length.end)
    return [training.outcome(text.held_out) for training in trainings]


def affordable_steps(done: int, step_s: float, end: float) -> int:
    """How many steps there is time for, as rank 0 sees it. `step_s`: a step of all ways."""
    # A forward pass alone takes a third of a step, if arithmetic is what a step takes.
    held_out_s = step_s * HELD_OUT_WINDOWS / dist.get_world_size() / BATCH / 3
    affordable = torch.tensor(done + (end - time.monotonic() - held_out_s) / step_s)
    dist.broadcast(affordable, src=0)
    return max(LEAST_STEPS, int(affordable))


class Training:
    """One way on one rank."""

    def __init__(self, way: Way, rank: int) -> None:
        torch.manual_seed(0)
        self.model = gpt.GPT(**MODEL)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=BUCKET_CAP_MB)
        self.optimizer, self.handle = optimizer_of(way, self.ddp)
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
        """Where it is, for the progress bar; None before its first turn."""
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
    way: Way, ddp: DistributedDataParallel
) -> tuple[torch.optim.Optimizer, zcomm.Handle | None]:
    adamw: dict[str, Any] = {"betas": BETAS, "weight_decay": WEIGHT_DECAY, "fused": True}
    if way.codec and way.param_codec:
        zero = zcomm.ZeroOptimizer(
            ddp, torch.optim.AdamW, codec=way.codec, param_codec=way.param_codec, **adamw
        )
        return zero, zero.handle
    handle = zcomm.compress(ddp, codec=way.codec) if way.codec else None
    return torch.optim.AdamW(ddp.parameters(), **adamw), handle


def lr_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine from 1 to 0.05."""
    done = max(0, step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return min((step + 1) / WARMUP_STEPS, 0.525 + 0.475 * math.cos(math.pi * done))


@torch.no_grad()
def held_out_loss(model: gpt.GPT, tokens: Tensor) -> float:
    """Over windows spread evenly over the text, always the same; each rank takes its share."""
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
