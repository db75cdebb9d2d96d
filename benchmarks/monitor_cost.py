"""What a monitor costs: training steps with and without one, taking turns.

Model, data and turns are those of training_step.py. Each codec runs with its default feedback and
with feedback on. The rows:

    nothing   no monitor
    totals    bytes, times and memory, every 10 steps: the default
    layers    figures of all layers at every step; the default is every 100th

Scalars go to TensorBoard if it is installed. The cost of a monitor, as a fraction of a step:

    cost = seconds spent in `totals` / seconds of `nothing`  +  (layers / nothing − 1) / 100

A clock inside the monitor measures the first term, which is too small to show up in the time of a
step. The second is the median of each round's ratio.

Usage: python benchmarks/monitor_cost.py [--hosts 2 --rate 1gbit] [--codecs lm4] [--rounds R]
       [--steps S] [--check] [--json F]
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

import measuring
import training_step
import zcomm
from measuring import Checked
from training_step import (
    BUCKET_CAP_MB,
    WARM_UP_STEPS,
    Training,
    stack_and_batch,
    take_turn,
    take_turns,
)
from zcomm.cli.bench.collective_rows import median_ratio
from zcomm.launch import hosts

NOTHING, TOTALS, LAYERS = "nothing", "totals", "layers"
FEEDBACKS = {"": None, " with feedback": True}
EVERY, LAYERS_EVERY = 10, 100  # the defaults
MOST = 0.01


class Clocked:
    """Times a monitor: the seconds that it takes in each step."""

    def __init__(self, monitor: Any) -> None:
        self.steps = [0.0]
        self._tell = monitor.take_bucket, monitor.end_step
        monitor.take_bucket, monitor.end_step = self._take_bucket, self._end_step

    def _take_bucket(self, *args: Any) -> None:
        started = time.perf_counter()
        self._tell[0](*args)
        self.steps[-1] += time.perf_counter() - started

    def _end_step(self) -> None:
        started = time.perf_counter()
        self._tell[1]()
        self.steps[-1] += time.perf_counter() - started
        self.steps.append(0.0)

    def inside_s(self, every: int) -> float:
        """Per step, if one step in `every` is sampled: from the medians of both kinds of step."""
        sampled = self.steps[every - 1 : -1 : every] or [0.0]
        others = [s for i, s in enumerate(self.steps[:-1], 1) if i % every] or [0.0]
        return statistics.median(sampled) / every + statistics.median(others) * (1 - 1 / every)


class Values:
    """A writer for machines without TensorBoard."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.last[tag] = value


def writer(folder: str) -> Any:
    if importlib.util.find_spec("tensorboard") is None:
        return Values()
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


def training_of(way: str, codec: str, rank: int, folder: str) -> tuple[Training, Clocked]:
    model, batch = stack_and_batch(rank)
    ddp = DDP(model, bucket_cap_mb=BUCKET_CAP_MB)
    spec, _, words = codec.partition(" ")
    handle = zcomm.compress(ddp, spec, feedback=FEEDBACKS[f" {words}" if words else ""])
    training = Training(ddp, AdamW(model.parameters(), lr=1e-4, fused=True), batch, handle)
    every = {"layers_every": 1} if way == LAYERS else {"layers_every": None}
    to = None if way == NOTHING else writer(folder)
    return training, Clocked(zcomm.monitor.TensorBoard(handle, to, **every))


class Outcome(NamedTuple):
    """One row on one rank."""

    s: list[float]  # per step, for each round
    inside_s: float  # per step, spent in the monitor
    digest: int


def measure(rank: int, world_size: int, codec: str, rounds: int, steps: int) -> dict[str, Outcome]:
    """Runs on every rank, and every rank has a monitor."""
    with tempfile.TemporaryDirectory() as folder:
        ways = (NOTHING, TOTALS, LAYERS)
        rows = {way: training_of(way, codec, rank, folder) for way in ways}
        for training, _ in rows.values():
            take_turn(training, WARM_UP_STEPS)
        turns = take_turns({way: training for way, (training, _) in rows.items()}, rounds, steps)
    return {
        way: Outcome(
            [turn.s for turn in turns[way]],
            clock.inside_s(1 if way == LAYERS else EVERY),
            training.digest(),
        )
        for way, (training, clock) in rows.items()
    }


@dataclass(frozen=True)
class Row:
    codec: str
    ranks: int
    link: str
    ms: float  # a step without a monitor
    totals: float  # a step with totals / a step without a monitor
    layers: float  # a step with layers / a step without a monitor
    totals_inside: float  # time spent in the monitor / a step without one
    layers_inside: float
    bits_agree: bool  # on all ranks, with and without monitors

    @property
    def cost(self) -> float:
        return self.totals_inside + max(self.layers - 1, 0.0) / LAYERS_EVERY


def row_of(by_rank: list[dict[str, Outcome]], codec: str, link: str) -> Row:
    slowest = {way: [max(s) for s in zip(*(one[way].s for one in by_rank))] for way in by_rank[0]}
    inside = {way: max(one[way].inside_s for one in by_rank) for way in (TOTALS, LAYERS)}
    s = statistics.median(slowest[NOTHING])
    return Row(
        codec=codec,
        ranks=len(by_rank),
        link=link,
        ms=1e3 * s,
        totals=median_ratio(slowest[TOTALS], slowest[NOTHING]),
        layers=median_ratio(slowest[LAYERS], slowest[NOTHING]),
        totals_inside=inside[TOTALS] / s,
        layers_inside=inside[LAYERS] / s,
        bits_agree=len({outcome.digest for one in by_rank for outcome in one.values()}) == 1,
    )


def checked(row: Row) -> Iterator[Checked]:
    name = f"{row.codec}, {row.ranks} ranks, {row.link}"
    yield Checked(f"{name}: a monitor's share of a step", row.cost, MOST, most=True)
    if not row.bits_agree:
        yield Checked(f"{name}: the same bits with and without", 0, 1)


def print_rows(rows: list[Row]) -> None:
    print(f"{'':20} {'ms':>8} {'totals':>7} {'inside':>9} {'layers':>7} {'inside':>9}")
    for row in rows:
        totals = f"{row.totals:7.3f} {row.totals_inside:9.5f}"
        print(f"{row.codec:20} {row.ms:8.1f} {totals} {row.layers:7.3f} {row.layers_inside:9.5f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Training steps with and without monitors, as ratios measured in one run."
    )
    training_step.add_options(parser)
    measuring.add_options(parser, rounds=20, codecs=("lm4",))
    return measuring.parsed(parser)


def main() -> int:
    args = parse()
    ranks, link, where, about = measuring.begin(args)
    rows = []
    for codec in (f"{spec}{words}" for spec in args.codecs for words in FEEDBACKS):
        by_rank = hosts.run(ranks, measure, codec, args.rounds, args.steps, **where)
        rows.append(row_of(by_rank, codec, link))
    print_rows(rows)
    return measuring.finish(args, about, rows, [one for row in rows for one in checked(row)])


if __name__ == "__main__":
    sys.exit(main())
