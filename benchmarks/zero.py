"""ZeRO stage 1 in a training step: DDP, torch's ZeroRedundancyOptimizer and zcomm's ZeroOptimizer.

Model, data and turns are those of training_step.py. The row `zero G+P` sends gradients with codec G
and parameters with codec P; `zero G` sends exact parameters. All rows use AdamW, fused or not.

    state = bytes of optimizer state on the rank with the most / bytes with DDP

`peak` is the most after any of the first steps (DDP rebuilds its buckets in them) or at the end.

Usage: python benchmarks/zero.py [--hosts 2 --rate 1gbit] [--codecs none lm4 lm4+lm4]
       [--no-fused] [--rounds R] [--steps S] [--check] [--json F]
       python benchmarks/zero.py --profile [--hosts 2 --rate 1gbit] [--codecs lm4+lm4]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW, Optimizer

import measuring
import training_step
import zcomm
from measuring import LOOPBACK, Checked
from training_step import (
    BUCKET_CAP_MB,
    WARM_UP_STEPS,
    StepRow,
    Steps,
    Training,
    stack_and_batch,
    take_turn,
    take_turns,
)
from zcomm.launch import hosts

BASELINE, TORCH_ZERO = "DDP + AdamW", "ZeroRedundancyOptimizer"
CODECS = ("none", "lm4", "lm4+lm4", "int8+int8")  # of gradients + parameters

# The least speed-ups, by row, link and ranks.
BARS = {
    ("zero lm4+lm4", "1gbit", 2): {BASELINE: 2.5, TORCH_ZERO: 2.5},
    ("zero none", LOOPBACK, 2): {BASELINE: 1.15, TORCH_ZERO: 1.2},
    ("zero none", LOOPBACK, 4): {BASELINE: 1.15, TORCH_ZERO: 1.2},
}
STATE_TOLERANCE = 0.005  # around 1 / ranks


def training_of(way: str, model: nn.Module, batch: Tensor, fused: bool) -> Training:
    """`way` is a row's name."""
    ddp = DDP(model, bucket_cap_mb=BUCKET_CAP_MB)
    options = {"lr": 1e-4, "fused": fused}
    if way == BASELINE:
        return Training(ddp, AdamW(model.parameters(), **options), batch)
    if way == TORCH_ZERO:
        return Training(ddp, ZeroRedundancyOptimizer(model.parameters(), AdamW, **options), batch)
    codec, _, param_codec = way.removeprefix("zero ").partition("+")
    zero = zcomm.ZeroOptimizer(ddp, AdamW, None, codec, param_codec or None, **options)
    return Training(ddp, zero, batch, zero.handle)


def local(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer that a rank runs itself."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer.optim
    return optimizer.inner if isinstance(optimizer, zcomm.ZeroOptimizer) else optimizer


def state_nbytes(optimizer: Optimizer) -> int:
    states = local(optimizer).state.values()
    return sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor))


@dataclass(frozen=True)
class Outcome(training_step.Outcome):
    state: list[int]  # bytes, after each of the first steps and at the end


def measure(
    rank: int, world_size: int, ways: list[str], fused: bool, rounds: int, steps: int
) -> dict[str, Outcome]:
    """Runs on every rank."""
    trainings = {way: training_of(way, *stack_and_batch(rank), fused) for way in ways}
    states: dict[str, list[int]] = {way: [] for way in ways}
    for way, training in trainings.items():
        for _ in range(WARM_UP_STEPS):
            training.step()
            states[way].append(state_nbytes(training.optimizer))
    turns = take_turns(trainings, rounds, steps)
    return {
        way: Outcome(
            turns[way],
            training.digest(),
            training.stats(),
            [*states[way], state_nbytes(training.optimizer)],
        )
        for way, training in trainings.items()
    }


@dataclass(frozen=True)
class Row(StepRow):
    """`speedup` is against DDP + AdamW; state is a fraction of DDP's."""

    speedup_of_zero: float  # against ZeroRedundancyOptimizer
    state_first: float  # after the first step
    state_peak: float
    state_end: float


def rows_of(steps: Steps) -> Iterator[Row]:
    whole = steps.outcomes(BASELINE)[0].state[-1]
    for way in steps.ways:
        sizes = zip(*(one.state for one in steps.outcomes(way)))
        state = [max(of_ranks) / whole for of_ranks in sizes]
        yield Row(
            **steps.values(way, BASELINE),
            speedup_of_zero=steps.speedup(way, TORCH_ZERO),
            state_first=state[0],
            state_peak=max(state),
            state_end=state[-1],
        )


def checked(row: Row) -> Iterator[Checked]:
    name = f"{row.way}, {row.ranks} ranks, {row.link}"
    bars = BARS.get((row.way, row.link, row.ranks), {})
    for baseline, speedup in ((BASELINE, row.speedup), (TORCH_ZERO, row.speedup_of_zero)):
        if baseline in bars:
            yield Checked(f"{name}: speed-up against {baseline}", speedup, bars[baseline])
    if row.way not in (BASELINE, TORCH_ZERO):
        states = (row.state_first, row.state_peak, row.state_end)
        off = max(abs(state * row.ranks - 1) for state in states)
        yield Checked(f"{name}: state, off 1/{row.ranks} by", off, STATE_TOLERANCE, most=True)
    if not row.replicas_agree:
        yield Checked(f"{name}: replicas agree", 0, 1)


def print_rows(rows: list[Row]) -> None:
    head = f"{'ms':>8} {'to DDP':>7} {'to ZRO':>7} {'MB sent':>8} {'state':>7} {'peak':>7}"
    print(f"{'':24} {head} replicas")
    for row in rows:
        numbers = f"{row.ms:8.1f} {row.speedup:7.2f} {row.speedup_of_zero:7.2f} {row.sent_mb:8.1f}"
        states = f"{row.state_end:7.4f} {row.state_peak:7.4f}"
        print(f"{row.way:24} {numbers} {states} {'agree' if row.replicas_agree else 'DIFFER'}")


class Parts(NamedTuple):
    """Where the time of a step goes on one rank, in seconds."""

    backward: float  # and forward
    exposed: float  # waiting for gradients at the end of backward; 0 in rows without zcomm
    update: float  # all of optimizer.step() and zero_grad()
    local: float  # the part of update that the rank's own optimizer takes; the rest communicates


def profile(
    rank: int, world_size: int, ways: list[str], fused: bool, steps: int
) -> dict[str, list[Parts]]:
    """Runs on every rank: returns the parts of each step."""
    trainings = {way: training_of(way, *stack_and_batch(rank), fused) for way in ways}
    clocks = {way: Clock(local(training.optimizer)) for way, training in trainings.items()}
    for training in trainings.values():
        take_turn(training, WARM_UP_STEPS)
    turns = [
        {way: parts_of_step(trainings[way], clocks[way]) for way in ways} for _ in range(steps)
    ]
    return {way: [turn[way] for turn in turns] for way in ways}


class Clock:
    """Times an optimizer's last step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.s = 0.0
        optimizer.register_step_pre_hook(self._start)
        optimizer.register_step_post_hook(self._stop)

    def _start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        self.s = time.perf_counter() - self._started


def parts_of_step(training: Training, clock: Clock) -> Parts:
    exposed = training.stats().get("exposed_s", 0.0)
    dist.barrier()
    start = time.perf_counter()
    training.backward()
    middle = time.perf_counter()
    exposed = training.stats().get("exposed_s", 0.0) - exposed
    dist.barrier()  # or a fast rank's update would include the wait for a slow rank's backward
    resumed = time.perf_counter()
    training.update()
    return Parts(middle - start, exposed, time.perf_counter() - resumed, clock.s)


def print_parts(by_rank: list[dict[str, list[Parts]]]) -> None:
    print(f"{'ms, slowest rank':24} {'backward':>9} {'exposed':>8} {'update':>7} {'local':>6}")
    for way in by_rank[0]:
        steps = zip(*(one[way] for one in by_rank))
        slowest = [Parts(*map(max, zip(*parts))) for parts in steps]
        ms = Parts(*(1e3 * statistics.median(part) for part in zip(*slowest)))
        print(f"{way:24} {ms.backward:9.1f} {ms.exposed:8.1f} {ms.update:7.1f} {ms.local:6.1f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="ZeRO stage 1 with torch and with zcomm, as ratios measured in one run."
    )
    training_step.add_options(parser)
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--profile", action="store_true", help="print the parts of a step instead")
    measuring.add_options(parser, rounds=10, codecs=CODECS)
    return measuring.parsed(parser)


def main() -> int:
    args = parse()
    ranks, link, where, about = measuring.begin(args, fused=args.fused)
    ways = [BASELINE, TORCH_ZERO, *(f"zero {codecs}" for codecs in args.codecs)]
    if args.profile:
        print_parts(hosts.run(ranks, profile, ways, args.fused, args.rounds * args.steps, **where))
        return 0
    by_rank = hosts.run(ranks, measure, ways, args.fused, args.rounds, args.steps, **where)
    rows = list(rows_of(Steps(by_rank, link)))
    print_rows(rows)
    return measuring.finish(args, about, rows, [one for row in rows for one in checked(row)])


if __name__ == "__main__":
    sys.exit(main())
