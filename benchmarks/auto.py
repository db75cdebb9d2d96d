"""codec="auto" against plain DDP and against every codec that it chooses from.

The model and the steps are those of training_step.py. In every round all rows take a turn. Each run
starts new ranks, which measure and choose anew; auto's steps count once it has checked its choice.

    against plain        plain DDP's time / auto's, in the same round; the median of a run's rounds
    against the best     the same for the fixed codec that was fastest in that run
    prediction           what handle.choice expected of a step, over what was measured

Usage: python benchmarks/auto.py [--layouts 2 4 1+1 2+2 3+1] [--rates 10gbit 1gbit 100mbit]
       [--codecs none bf16 int8 lm4] [--runs R] [--rounds R] [--steps S] [--choosing] [--check]
       [--json F]
       python benchmarks/auto.py --svg docs/auto.svg --from benchmarks/results/auto*.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import measuring
import zcomm
from measuring import LOOPBACK, Checked
from training_step import PLAIN, WARM_UP_STEPS, stack_and_batch, take_turn, take_turns, training_of
from zcomm.cli.bench.collective_rows import median_ratio
from zcomm.engine.tuning.check import FIRST_STEP, STEPS
from zcomm.engine.tuning.measure import CANDIDATES
from zcomm.launch import hosts
from zcomm.report import plot
from zcomm.report.units import parse_rate

AUTO = "auto"
CHECKED_STEPS = FIRST_STEP + STEPS + 2  # then auto has decided for good
CHOOSING_RANKS = 8
DRAWN = "1+1"
# Medians over the runs, and for any single run.
LEAST_OF_PLAIN, LEAST_OF_PLAIN_ONCE, LEAST_OF_BEST = 0.98, 0.95, 0.95
MOST_OFF, MOST_CHOOSING_S, MOST_OF_500_STEPS = 0.2, 2.0, 0.01


class Setting(NamedTuple):
    """Ranks on each host, and the rate of the hosts' links; one host is loopback."""

    per_host: tuple[int, ...]
    rate: str | None

    @property
    def layout(self) -> str:
        return "+".join(map(str, self.per_host))

    def where(self) -> dict[str, Any]:
        return {} if self.rate is None else {"hosts": self.per_host, "rate": self.rate}


class Outcome(NamedTuple):
    """One run on one rank: seconds per step of each turn, by row, and what auto said."""

    turns: dict[str, list[float]]
    codec: str
    chosen_first: str
    expected_s: dict[str, float]  # of a step, by codec
    measured_s: float  # what choosing took
    reason: str


def measure(rank: int, world_size: int, ways: Sequence[str], rounds: int, steps: int) -> Outcome:
    """Runs on every rank."""
    trainings = {way: training_of(way, *stack_and_batch(rank)) for way in ways}
    auto = trainings[AUTO]
    first = auto.handle.choice
    take_turn(auto, CHECKED_STEPS)
    for way in ways:
        if way != AUTO:
            take_turn(trainings[way], WARM_UP_STEPS)
    taken = take_turns(trainings, rounds, steps)
    choice = auto.handle.choice
    return Outcome(
        {way: [turn.s for turn in turns] for way, turns in taken.items()},
        choice.codec,
        first.codec,
        {one.codec or PLAIN: one.step_s for one in choice.options if one.step_s},
        first.measured_s,
        choice.reason,
    )


@dataclass(frozen=True)
class Row:
    """One setting: medians over the runs."""

    layout: str
    link: str
    chosen: list[str]  # in each run
    ms: dict[str, float]
    of_plain: list[float]  # in each run
    of_best: list[float]
    best: list[str]  # the fastest fixed codec, in each run
    off: dict[str, float]  # expected / measured step - 1, by row; of the last run
    choosing_s: float
    reason: str


def row_of(setting: Setting, runs: Sequence[Sequence[Outcome]]) -> Row:
    slowest = [
        {
            way: [max(turns) for turns in zip(*(one.turns[way] for one in run))]
            for way in run[0].turns
        }
        for run in runs
    ]
    ms = {
        way: 1e3 * statistics.median(s for run in slowest for s in run[way]) for way in slowest[0]
    }
    fixed = [way for way in ms if way not in (PLAIN, AUTO)]
    best = [min(fixed, key=lambda way: statistics.median(run[way])) for run in slowest]
    expected = {
        way: statistics.median(run[0].expected_s[way] for run in runs)
        for way in runs[0][0].expected_s
        if way in ms
    }
    return Row(
        setting.layout,
        setting.rate or LOOPBACK,
        [run[0].codec for run in runs],
        ms,
        [median_ratio(run[PLAIN], run[AUTO]) for run in slowest],
        [median_ratio(run[way], run[AUTO]) for run, way in zip(slowest, best)],
        best,
        {way: 1e3 * s / ms[way] - 1 for way, s in expected.items()},
        max(one.measured_s for run in runs for one in run),
        runs[-1][0].reason,
    )


def print_row(row: Row) -> None:
    times = " ".join(f"{way} {ms:.0f}" for way, ms in row.ms.items())
    print(f"\n{row.layout} at {row.link}: {row.reason}")
    print(f"  ms: {times}; chosen {row.chosen}, best {row.best}, in {row.choosing_s:.2f} s")
    plain = " ".join(f"{x:.2f}" for x in row.of_plain)
    best = " ".join(f"{x:.2f}" for x in row.of_best)
    off = " ".join(f"{way} {x:+.0%}" for way, x in row.off.items())
    print(f"  against plain {plain}; against the best {best}; predictions {off}", flush=True)


def checked(row: Row) -> Iterator[Checked]:
    name = f"{row.layout} at {row.link}"
    yield Checked(f"{name}: of plain DDP", statistics.median(row.of_plain), LEAST_OF_PLAIN)
    yield Checked(f"{name}: of plain DDP, worst run", min(row.of_plain), LEAST_OF_PLAIN_ONCE)
    yield Checked(f"{name}: of the best codec", statistics.median(row.of_best), LEAST_OF_BEST)
    for way in (PLAIN, row.chosen[-1]):
        if way in row.off:
            off = abs(row.off[way])
            yield Checked(f"{name}: prediction of {way} off by", off, MOST_OFF, most=True)
    share = row.choosing_s / (500 * row.ms[AUTO] / 1e3)
    yield Checked(f"{name}: choosing, of 500 steps", share, MOST_OF_500_STEPS, most=True)


def time_to_choose(rank: int, world_size: int) -> float:
    """Runs on every rank: how long compress() takes more with auto than with a codec."""
    seconds = []
    for way in ("lm4", "lm4", AUTO):  # the first one loads the kernels
        ddp = DistributedDataParallel(nn.Linear(1000, 1000))
        dist.barrier()
        started = time.perf_counter()
        zcomm.compress(ddp, codec=way)
        seconds.append(time.perf_counter() - started)
    return seconds[2] - seconds[1]


def drawn(paths: Sequence[Path]) -> str:
    """How much faster than plain DDP each row is, over the rate of the link, as SVG."""
    rows = [row for path in paths for row in json.loads(path.read_text())["rows"]]
    between = [row for row in rows if row["layout"] == DRAWN and row["link"] != LOOPBACK]
    between.sort(key=lambda row: parse_rate(row["link"]))
    series = []
    for way in (*CANDIDATES, AUTO):
        there = [row for row in between if way in row["ms"]]
        speedups = [row["ms"][PLAIN] / row["ms"][way] for row in there]
        rates = [parse_rate(row["link"]) / 1e9 for row in there]
        series.append(plot.Series(way, rates, speedups))
    title, x_label = "A step on two hosts, 25M parameters", "Gbit/s between hosts"
    y_label = "times as fast as plain DDP"
    return plot.lines(series, title=title, x_label=x_label, y_label=y_label, log=True)


def settings_of(args: argparse.Namespace) -> list[Setting]:
    layouts = [tuple(map(int, layout.split("+"))) for layout in args.layouts]
    return [
        Setting(layout, rate)
        for layout in layouts
        for rate in (args.rates if len(layout) > 1 else [None])
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="codec='auto' against plain DDP and all codecs.")
    layouts = ["2", "4", "1+1", "2+2", "3+1"]
    parser.add_argument("--layouts", nargs="+", default=layouts, help="ranks on each host")
    rates = ["10gbit", "1gbit", "100mbit"]
    parser.add_argument("--rates", nargs="+", default=rates, help="of the links between hosts")
    fixed = "fixed codecs to compare with"
    parser.add_argument("--codecs", nargs="+", default=list(CANDIDATES), help=fixed)
    parser.add_argument("--runs", type=int, default=3, help="with new ranks each")
    parser.add_argument("--steps", type=int, default=2, help="steps per turn")
    parser.add_argument("--choosing", action="store_true", help="only the time that choosing takes")
    parser.add_argument("--svg", type=Path, help="only draw the results of --from")
    parser.add_argument("--from", dest="results", nargs="+", type=Path, default=[])
    measuring.add_output_options(parser, rounds=15)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.svg:
        args.svg.write_text(drawn(args.results))
        return 0
    about = measuring.about(rounds=args.rounds, steps=args.steps, runs=args.runs)
    measuring.print_about(about)
    rows, bars = [], []
    if args.choosing:
        where: dict[str, Any] = {"hosts": (4, 4), "rate": args.rates[0]}
        s = max(hosts.run(CHOOSING_RANKS, time_to_choose, **where))
        name = f"choosing on {CHOOSING_RANKS} ranks at {args.rates[0]}: seconds"
        return measuring.finish(args, about, [], [Checked(name, s, MOST_CHOOSING_S, most=True)])
    for setting in settings_of(args):
        ways = [PLAIN, *args.codecs, AUTO]
        runs = [
            hosts.run(
                sum(setting.per_host), measure, ways, args.rounds, args.steps, **setting.where()
            )
            for _ in range(args.runs)
        ]
        rows.append(row_of(setting, runs))
        print_row(rows[-1])
        bars += checked(rows[-1])
    return measuring.finish(args, about, rows, bars)


if __name__ == "__main__":
    sys.exit(main())
