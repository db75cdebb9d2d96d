"""FSDP2 in a training step, and what compression costs there in held-out loss.

Model, data and turns are those of training_step.py; each layer is an FSDP module. The row `2 G` is
stage 2 (reshard_after_forward=False) and sends gradients with codec G. `3 G+P` is stage 3 and also
sends gathered parameters with codec P. `plain` is FSDP2 with torch's own collectives. A speed-up is
against the plain row of the same stage.

--convergence trains the GPT of convergence.py on two ranks, plain and with codecs, on the same data
and seeds. It compares runs of the same seed.

Usage: python benchmarks/fsdp.py [--hosts 2 --rate 1gbit] [--codecs "2 lm4" "3 lm4+int8"]
       [--rounds R] [--steps S] [--check] [--json F]
       python benchmarks/fsdp.py --convergence [--seeds N] [--check]
       [--json benchmarks/results/fsdp_convergence.json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

import convergence
import measuring
import training_step
import zcomm.fsdp
from measuring import LOOPBACK, Checked
from training_step import Outcome, StepRow, Steps, stack_and_batch
from zcomm.cli.bench.collective_tasks import digest
from zcomm.cli.demo import gpt
from zcomm.launch import hosts

PLAIN = "plain"
WAYS = ("2 none", "2 lm4", "3 none", "3 lm4", "3 lm4+int8")

# The least speed-ups, by row, link and ranks.
BARS = {("2 lm4", "1gbit", 2): 1.5, ("3 lm4+int8", "1gbit", 2): 2.5}
BARS |= {(way, LOOPBACK, 2): 1.5 for way in ("2 none", "3 none")}
BARS |= {(way, LOOPBACK, 4): 1.4 for way in ("2 none", "3 none")}
# The most that the mean loss of the seeds may lie above plain FSDP2, in %.
LOSS_BARS = {"2 lm4": 0.7}
LOSS_WAYS = ("2 lm4", "3 lm4+int8")


def sharded(model: nn.Module, layers: Sequence[nn.Module], way: str) -> Any:
    """Applies FSDP2 and, unless `way` is plain, zcomm; returns zcomm's handle."""
    stage, _, codecs = way.partition(" ")
    for module in (*layers, model):
        fully_shard(module, reshard_after_forward=stage == "3")
    if codecs == PLAIN:
        return None
    codec, _, param_codec = codecs.partition("+")
    return zcomm.fsdp.compress(model, codec, param_codec or None)


def baseline_of(way: str) -> str:
    return f"{way[0]} {PLAIN}"


@dataclass(frozen=True)
class Training(training_step.Training):
    """One row: `ddp` is the model under FSDP2."""

    def digest(self) -> int:
        """Of the whole parameters, so all ranks must call it."""
        return sum(digest(p.detach().full_tensor()) for p in self.ddp.parameters())


def training_of(way: str, model: Any, batch: Tensor) -> Training:
    handle = sharded(model, model.layers, way)
    return Training(model, AdamW(model.parameters(), lr=1e-4, fused=True), batch, handle)


def measure(
    rank: int, world_size: int, ways: list[str], rounds: int, steps: int
) -> dict[str, Outcome]:
    """Runs on every rank."""
    trainings = {way: training_of(way, *stack_and_batch(rank)) for way in ways}
    return training_step.outcomes(trainings, rounds, steps)


def checked(row: StepRow) -> Iterator[Checked]:
    name = f"{row.way}, {row.ranks} ranks, {row.link}"
    bar = BARS.get((row.way, row.link, row.ranks))
    if bar is not None:
        yield Checked(f"{name}: speed-up", row.speedup, bar)
    if not row.replicas_agree:
        yield Checked(f"{name}: replicas agree", 0, 1)


def print_rows(rows: list[StepRow]) -> None:
    print(f"{'stage, codecs':14} {'ms':>8} {'speed-up':>9} {'MB sent':>8} replicas")
    for row in rows:
        agree = "agree" if row.replicas_agree else "DIFFER"
        print(f"{row.way:14} {row.ms:8.1f} {row.speedup:9.2f} {row.sent_mb:8.1f} {agree}")


# Convergence.


@dataclass(frozen=True)
class LossRow:
    way: str
    losses: list[float]  # final held-out loss of each seed
    differences: list[float]  # in % of plain FSDP2

    @property
    def difference(self) -> float:
        return statistics.fmean(self.differences)


def train(way: str, seed: int, steps: int, text: gpt.Text, rank: int, world_size: int) -> float:
    """Trains as convergence.py does, but under FSDP2; returns the final held-out loss."""
    torch.manual_seed(seed)
    model: Any = gpt.GPT(**convergence.MODEL)
    handle = sharded(model, model.blocks, way)
    optimizer = AdamW(
        model.parameters(),
        lr=convergence.PEAK_LR,
        betas=convergence.BETAS,
        weight_decay=0.1,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: convergence.lr_factor(step, steps)
    )
    batches = torch.Generator().manual_seed(seed * world_size + rank)
    for _ in range(steps):
        windows = gpt.random_windows(text.train, convergence.BATCH, model.context, batches)
        model(*windows).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    if handle is not None:
        handle.close()  # evaluate with exact parameters
    windows_count = convergence.HELD_OUT_WINDOWS
    return convergence.held_out_loss(model, text.held_out, windows_count, rank, world_size)


def converge(
    rank: int, world_size: int, ways: list[str], seeds: int, steps: int
) -> dict[str, list[float]]:
    """Runs on every rank: returns the losses of all seeds."""
    text = gpt.standard_library()
    losses: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(seeds):
        for way in ways:
            started = time.perf_counter()
            losses[way].append(train(way, seed, steps, text, rank, world_size))
            if rank == 0:
                seconds = time.perf_counter() - started
                print(f"seed {seed}, {way}: {losses[way][-1]:.4f}, {seconds:.0f} s", flush=True)
    return losses


def loss_rows(losses: dict[str, list[float]]) -> Iterator[LossRow]:
    for way, mine in losses.items():
        pairs = zip(mine, losses[baseline_of(way)])
        yield LossRow(way, mine, [100 * (loss / plain - 1) for loss, plain in pairs])


def print_losses(rows: list[LossRow]) -> None:
    print(f"{'stage, codecs':14} {'loss':>8} {'to plain, %':>12} seeds, %")
    for row in rows:
        seeds = ", ".join(f"{one:+.2f}" for one in row.differences)
        print(f"{row.way:14} {statistics.fmean(row.losses):8.4f} {row.difference:+12.2f} {seeds}")


def losses_checked(rows: list[LossRow]) -> Iterator[Checked]:
    for row in rows:
        if row.way in LOSS_BARS:
            name = f"{row.way}, % above plain FSDP2"
            yield Checked(name, row.difference, LOSS_BARS[row.way], most=True)


def with_baselines(ways: Sequence[str]) -> list[str]:
    """Adds the plain row of each stage, before the first row that needs it."""
    return list(dict.fromkeys(name for way in ways for name in (baseline_of(way), way)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="FSDP2 with torch's collectives and with zcomm's, measured in one run."
    )
    training_step.add_options(parser)
    parser.add_argument("--convergence", action="store_true", help="train a GPT instead")
    parser.add_argument("--seeds", type=int, default=len(convergence.SEEDS), help="how many")
    parser.add_argument("--train-steps", type=int, default=convergence.STEPS)
    measuring.add_options(parser, rounds=10, codecs=())
    return measuring.parsed(parser)


def main() -> int:
    args = parse()
    if args.convergence:
        ways = with_baselines(args.codecs or LOSS_WAYS)
        about = measuring.about(**convergence.settings(), steps=args.train_steps)
        seconds = 300.0 * len(ways) * args.seeds
        options = ways, args.seeds, args.train_steps
        by_rank = hosts.run(convergence.WORLD_SIZE, converge, *options, timeout_s=seconds)
        losses = list(loss_rows(by_rank[0]))
        print_losses(losses)
        return measuring.finish(args, about, losses, list(losses_checked(losses)))
    ranks, link, where, about = measuring.begin(args)
    ways = with_baselines(args.codecs or WAYS)
    by_rank = hosts.run(ranks, measure, ways, args.rounds, args.steps, **where)
    steps = Steps(by_rank, link)
    rows = [StepRow(**steps.values(way, baseline_of(way))) for way in steps.ways]
    print_rows(rows)
    return measuring.finish(args, about, rows, [one for row in rows for one in checked(row)])


if __name__ == "__main__":
    sys.exit(main())
