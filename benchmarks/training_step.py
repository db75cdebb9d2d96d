"""What communication adds to a training step: plain DDP, DDP with zcomm, DDP that sends nothing.

A transformer with 25M parameters, AdamW, random data. Each row has its own copy of the model in its
own DDP, and the rows take turns of a few steps. A turn takes as long as its slowest rank. Times are
medians over the rounds; a speed-up is the median of each round's ratio.

    exposed = a step − a step whose hook does nothing, in the same round

Usage: python benchmarks/training_step.py [--hosts 2 --rate 1gbit] [--codecs none int8 lm4]
       [--rounds R] [--steps S] [--check] [--json F]
       python benchmarks/training_step.py --memory [--check] [--json F]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import measuring
import zcomm
from measuring import LOOPBACK, Checked
from zcomm.cli.bench.collective_rows import median_ratio
from zcomm.cli.bench.collective_tasks import digest
from zcomm.launch import hosts

PLAIN, NOTHING = "plain DDP", "nothing"
WIDTH, LAYERS = 512, 8
BATCH, TOKENS = 2, 16  # backward takes 70 to 100 ms on one core of an AMD EPYC (Zen 3)
WARM_UP_STEPS = 3  # DDP rebuilds its buckets in the second
BUCKET_CAP_MB = 25  # DDP's default
STATS = ("raw_bytes", "wire_bytes", "ratio", "encode_s", "wait_s", "decode_s", "exposed_s", "steps")

# The least speed-up and the largest share of plain DDP's exposed time, by codec, link and ranks.
BARS = {
    ("lm4", "1gbit", 2): {"speedup": 2.5, "exposed_share": 0.15},
    **{("none", LOOPBACK, ranks): {"speedup": 1.2} for ranks in (2, 4)},
}
MEMORY_CODEC = "lm4"
MEMORY_STEPS = (100, 1000)
MEMORY_GROWTH_MB = 2.0
BUFFERS_MB = 2 * BUCKET_CAP_MB


def stack() -> nn.Module:
    """25.2M parameters in 96 tensors."""
    layer = nn.TransformerEncoderLayer(
        WIDTH, nhead=8, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


# No annotations: in this file they are strings, and DDP rejects hooks annotated with strings.
def do_nothing(_, bucket):  # type: ignore[no-untyped-def]
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@dataclass(frozen=True)
class Training:
    """One row: a model in its DDP, its optimizer, and zcomm's handle, if any."""

    ddp: DDP
    optimizer: torch.optim.Optimizer
    batch: Tensor
    handle: Any = None

    def step(self) -> None:
        self.backward()
        self.update()

    def backward(self) -> None:
        self.ddp(self.batch).square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> int:
        return sum(digest(parameter.detach()) for parameter in self.ddp.parameters())

    def stats(self) -> dict[str, float]:
        if self.handle is None:
            return {}
        stats = self.handle.stats()
        return {name: getattr(stats, name) for name in STATS}


def training_of(way: str, model: nn.Module, batch: Tensor) -> Training:
    """`way` is a codec, PLAIN or NOTHING."""
    ddp = DDP(model, bucket_cap_mb=BUCKET_CAP_MB)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if way == NOTHING:
        ddp.register_comm_hook(None, do_nothing)
    compressed = way not in (PLAIN, NOTHING)
    handle = zcomm.compress(ddp, codec=way) if compressed else None
    return Training(ddp, optimizer, batch, handle)


def stack_and_batch(rank: int) -> tuple[nn.Module, Tensor]:
    """The model, equal in every row and on every rank, and this rank's own batch."""
    torch.manual_seed(0)
    model = stack()
    torch.manual_seed(rank)
    return model, torch.randn(BATCH, TOKENS, WIDTH)


class Turn(NamedTuple):
    """A few steps of one row on one rank: seconds and bytes sent per step."""

    s: float
    sent: float


@dataclass(frozen=True)
class Outcome:
    """One row on one rank."""

    turns: list[Turn]
    digest: int
    stats: dict[str, float]


def take_turn(training: Training, steps: int) -> Turn:
    sent = hosts.sent_bytes()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        training.step()
    s = time.perf_counter() - start
    dist.barrier()
    return Turn(s / steps, (hosts.sent_bytes() - sent) / steps)


def measure(
    rank: int, world_size: int, ways: list[str], rounds: int, steps: int
) -> dict[str, Outcome]:
    """Runs on every rank."""
    trainings = {way: training_of(way, *stack_and_batch(rank)) for way in ways}
    return outcomes(trainings, rounds, steps)


def outcomes(trainings: Mapping[str, Training], rounds: int, steps: int) -> dict[str, Outcome]:
    """Warms up, then lets all rows take turns."""
    for training in trainings.values():
        take_turn(training, WARM_UP_STEPS)
    turns = take_turns(trainings, rounds, steps)
    return {
        way: Outcome(turns[way], training.digest(), training.stats())
        for way, training in trainings.items()
    }


def take_turns(trainings: Mapping[str, Training], rounds: int, steps: int) -> dict[str, list[Turn]]:
    """The turns of each row, one per round."""
    taken = [{way: take_turn(trainings[way], steps) for way in trainings} for _ in range(rounds)]
    return {way: [turns[way] for turns in taken] for way in trainings}


@dataclass(frozen=True)
class StepRow:
    """What all benchmarks of training steps report about a row."""

    way: str
    ranks: int
    link: str
    ms: float
    speedup: float  # against the baseline
    sent_mb: float  # per rank and step
    replicas_agree: bool
    stats: dict[str, float]  # of rank 0


class Steps:
    """The outcomes of all rows on all ranks."""

    def __init__(self, by_rank: Sequence[Mapping[str, Outcome]], link: str) -> None:
        self.by_rank, self.link = by_rank, link
        self.ways = list(by_rank[0])
        self.slowest = {way: self._slowest(way) for way in self.ways}

    def _slowest(self, way: str) -> list[float]:
        """The seconds per step of the slowest rank, for each round."""
        by_round = zip(*(outcome.turns for outcome in self.outcomes(way)))
        return [max(turn.s for turn in turns) for turns in by_round]

    def outcomes(self, way: str) -> list[Any]:
        return [one[way] for one in self.by_rank]

    def speedup(self, way: str, baseline: str) -> float:
        return median_ratio(self.slowest[baseline], self.slowest[way])

    def values(self, way: str, baseline: str) -> dict[str, Any]:
        """The fields of StepRow."""
        outcomes = self.outcomes(way)
        sent = statistics.median(turn.sent for one in outcomes for turn in one.turns)
        return {
            "way": way,
            "ranks": len(outcomes),
            "link": self.link,
            "ms": 1e3 * statistics.median(self.slowest[way]),
            "speedup": self.speedup(way, baseline),
            "sent_mb": sent / 1e6,
            "replicas_agree": len({one.digest for one in outcomes}) == 1,
            "stats": outcomes[0].stats,
        }


@dataclass(frozen=True)
class Row(StepRow):
    exposed_ms: float
    exposed_share: float  # of plain DDP's exposed time


def rows_of(steps: Steps) -> Iterator[Row]:
    idle = steps.slowest[NOTHING]
    exposed = {
        way: statistics.median(s - base for s, base in zip(steps.slowest[way], idle))
        for way in steps.ways
    }
    for way in steps.ways:
        # A ratio of medians, not a median of ratios: in one round a difference can be close to 0.
        share = exposed[way] / exposed[PLAIN]
        values = steps.values(way, PLAIN)
        yield Row(**values, exposed_ms=1e3 * exposed[way], exposed_share=share)


def checked(row: Row) -> Iterator[Checked]:
    name = f"{row.way}, {row.ranks} ranks, {row.link}"
    bars = BARS.get((row.way, row.link, row.ranks), {})
    if "speedup" in bars:
        yield Checked(f"{name}: speed-up", row.speedup, bars["speedup"])
    if "exposed_share" in bars:
        yield Checked(
            f"{name}: share of plain's exposed time",
            row.exposed_share,
            bars["exposed_share"],
            most=True,
        )
    if row.way != NOTHING and not row.replicas_agree:
        yield Checked(f"{name}: replicas agree", 0, 1)


def print_rows(rows: list[Row]) -> None:
    print(f"{'':12} {'ms':>8} {'speed-up':>9} {'exposed ms':>11} {'of plain':>9} {'MB sent':>8}")
    for row in rows:
        numbers = f"{row.ms:8.1f} {row.speedup:9.2f} {row.exposed_ms:11.1f}"
        print(f"{row.way:12} {numbers} {row.exposed_share:9.2f} {row.sent_mb:8.1f}")


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure_rss(rank: int, world_size: int, way: str) -> list[float]:
    """Runs on every rank: the size of the process in MB, after each of MEMORY_STEPS steps."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    training = training_of(way, model, torch.randn(4, 256))
    after = []
    for step in range(1, MEMORY_STEPS[-1] + 1):
        training.step()
        if step in MEMORY_STEPS:
            after.append(rss_mb())
    return after


def measure_buffers(rank: int, world_size: int, codecs: list[str]) -> dict[str, list[float]]:
    """Runs on every rank: the size of zcomm's buffers in MiB, after each of the first steps."""
    sizes: dict[str, list[float]] = {}
    for codec in codecs:
        training = training_of(codec, *stack_and_batch(rank))
        sizes[codec] = []
        for _ in range(WARM_UP_STEPS + 1):
            training.step()
            sizes[codec].append(training.handle.buffer_nbytes() / 2**20)
    return sizes


def rss_checked(where: dict[str, Any], ranks: int) -> Iterator[Checked]:
    """Plain DDP has no bar: it shows how much torch itself allocates."""
    for way in (PLAIN, MEMORY_CODEC):
        for rank, after in enumerate(hosts.run(ranks, measure_rss, way, **where)):
            at = ", ".join(f"step {step}: {mb:.1f}" for step, mb in zip(MEMORY_STEPS, after))
            name = f"{way}, rank {rank}: growth of the process in MB ({at})"
            one = Checked(name, after[-1] - after[0], MEMORY_GROWTH_MB, most=True)
            if way == PLAIN:
                print(f"{name}: {one.measured:.3g}")
            else:
                yield one


def buffers_checked(by_rank: list[dict[str, list[float]]]) -> Iterator[Checked]:
    for codec in by_rank[0]:
        first, *later = [max(sizes) for sizes in zip(*(one[codec] for one in by_rank))]
        # Iteration 0 is separate: DDP then hands over the whole model as one bucket.
        for name, size in (("iteration 0", first), ("later", max(later))):
            yield Checked(f"{codec}: buffers in MiB, {name}", size, BUFFERS_MB, most=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, help="instead of --ranks: one rank on each host")
    parser.add_argument("--steps", type=int, default=3, help="steps per turn")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A training step with and without zcomm, as ratios measured in one run."
    )
    add_options(parser)
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    measuring.add_options(parser, rounds=10)
    return measuring.parsed(parser)


def main() -> int:
    args = parse()
    ranks, link, where, about = measuring.begin(args)
    if args.memory:
        bars = list(rss_checked(where, ranks))
        bars += buffers_checked(hosts.run(ranks, measure_buffers, args.codecs, **where))
        return measuring.finish(args, about, [], bars)
    ways = [PLAIN, NOTHING, *args.codecs]
    by_rank = hosts.run(ranks, measure, ways, args.rounds, args.steps, **where)
    rows = list(rows_of(Steps(by_rank, link)))
    print_rows(rows)
    return measuring.finish(args, about, rows, [one for row in rows for one in checked(row)])


if __name__ == "__main__":
    sys.exit(main())
