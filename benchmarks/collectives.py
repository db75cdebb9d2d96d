"""How fast the compressed collectives are, against gloo's own in fp32.

All rows take turns in one run, each after a barrier. The time of a round is that of the slowest
rank; a time is the median of the rounds, a ratio the median of the rounds' own ratios. The size is
that of the whole fp32 buffer: what all_reduce reduces, reduce_scatter reads and all_gather writes.
Every result of every round is compared with the exact one, outside the time.

    share of the line rate = bytes sent at the interface / time / rate

Usage: python benchmarks/collectives.py [--size-mb 25 100] [--ranks 2 4] [--codecs none int8 lm4]
       [--hosts 2 4 --rate 1gbit] [--rounds R] [--check] [--json F]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import hosts
import measuring
import zcomm
from measuring import LOOPBACK, Checked

GLOO = "gloo"
KINDS = ("all_reduce", "reduce_scatter", "all_gather")
# How often each collective encodes a value: once on its way to the owner, once from there to all.
ENCODINGS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
# The normalised squared error of one encoding of Gaussian values, from benchmarks/README.md. What
# does not lose a bit by itself still rounds its sums.
ERRORS = {
    GLOO: 1e-12,
    "none": 1e-12,
    "bf16": 2.8e-6,
    "fp16": 4.3e-8,
    "int8": 4.2e-5,
    "fp8": 6.6e-4,
    "int4": 0.014,
    "lm4": 0.0092,
    "lm3": 0.034,
    "lm2": 0.12,
    "sign": 0.36,
    "topk": 0.92,
}
ROOM = 1.2


class Bar(NamedTuple):
    """A floor for one column of a row of 100 MB, by number of ranks."""

    kind: str
    codec: str
    column: str
    links: tuple[str, ...]
    least: dict[int, float]


GIGABIT = "1gbit"
BARS = (
    Bar("reduce_scatter", "none", "speedup", (LOOPBACK, GIGABIT), {2: 1.8, 4: 1.8}),
    Bar("all_reduce", "int8", "speedup", (LOOPBACK,), {2: 1.4, 4: 1.4}),
    Bar("all_reduce", "lm4", "speedup", (GIGABIT,), {2: 6.0, 4: 5.0}),
    Bar("all_reduce", "lm4", "line_share", (GIGABIT,), {2: 0.80, 4: 0.65}),
)
BAR_SIZE_MB = 100.0


class Sample(NamedTuple):
    """One row in one round on one rank."""

    s: float
    sent: float
    error: float
    digest: int


# The samples of one rank: for each row, by (kind, codec), one for each round.
Samples = dict[tuple[str, str], list[Sample]]


@dataclass(frozen=True)
class Row:
    kind: str
    codec: str
    size_mb: float
    ranks: int
    link: str
    ms: float
    speedup: float  # against gloo's fp32 collective of the same kind
    sent_mb: float  # per rank
    line_share: float | None
    error: float
    wrong: int  # rounds in which a result was too far off, or the ranks disagreed


class Task(NamedTuple):
    """A collective to time: `reset` before it, `result` after it, and what that should be."""

    reset: Callable[[], object]
    run: Callable[[], object]
    result: Callable[[], Tensor]
    exact: Tensor


class Buffers:
    """What the rows of one size share. Every rank knows every rank's input."""

    def __init__(self, rank: int, world_size: int, size_mb: float) -> None:
        self.world_size = world_size
        shard_numel = int(size_mb * 1e6) // 4 // world_size
        self.mean = torch.zeros(shard_numel * world_size)
        for peer in range(world_size):
            x = torch.randn(self.mean.numel(), generator=torch.Generator().manual_seed(peer))
            self.mean += x
            if peer == rank:
                self.input = x
        self.mean /= world_size
        self.whole = torch.empty_like(self.mean)
        self.shard = torch.empty(shard_numel)
        self.mean_shard = self.mean.view(world_size, -1)[rank]

    def task(self, kind: str, codec: str) -> Task:
        whole, shard = self.whole, self.shard
        run: Callable[..., object]
        if codec == GLOO:
            run = GLOO_COLLECTIVES[kind]
        else:
            run = partial(getattr(zcomm, kind), codec=codec)
        # gloo has no mean. Its sum is divided outside the time.
        divisor = self.world_size if codec == GLOO and kind != "all_gather" else 1
        if kind == "all_reduce":
            reset = partial(whole.copy_, self.input)
            return Task(reset, partial(run, whole), lambda: whole.div_(divisor), self.mean)
        if kind == "reduce_scatter":
            run = partial(run, shard, self.input)
            return Task(shard.zero_, run, lambda: shard.div_(divisor), self.mean_shard)
        return Task(whole.zero_, partial(run, whole, self.mean_shard), lambda: whole, self.mean)


GLOO_COLLECTIVES: dict[str, Callable[..., object]] = {
    "all_reduce": dist.all_reduce,
    "reduce_scatter": dist.reduce_scatter_single,
    "all_gather": dist.all_gather_single,
}


def normalised_error(x: Tensor, exact: Tensor) -> float:
    # In parts: temporaries of the whole size would cost more than the collective.
    parts = zip(x.split(1 << 20), exact.split(1 << 20))
    total = sum(float((a - b).square().sum(dtype=torch.float64)) for a, b in parts)
    return total / float(exact.square().sum(dtype=torch.float64))


def sample(task: Task) -> Sample:
    """The second barrier: what a rank has sent is at its interface when its peers have it."""
    task.reset()
    sent = hosts.sent_bytes()
    dist.barrier()
    start = time.perf_counter()
    task.run()
    s = time.perf_counter() - start
    dist.barrier()
    sent = hosts.sent_bytes() - sent
    result = task.result()
    return Sample(s, sent, normalised_error(result, task.exact), measuring.digest(result))


def measure(
    rank: int, world_size: int, sizes_mb: list[float], codecs: list[str], rounds: int
) -> dict[float, Samples]:
    """Runs on every rank. A first round warms up and is not counted."""
    samples: dict[float, Samples] = {}
    for size_mb in sizes_mb:
        buffers = Buffers(rank, world_size, size_mb)
        keys = [(kind, codec) for kind in KINDS for codec in (GLOO, *codecs)]
        tasks = {key: buffers.task(*key) for key in keys}
        turns = [{key: sample(task) for key, task in tasks.items()} for _ in range(rounds + 1)]
        samples[size_mb] = {key: [turn[key] for turn in turns[1:]] for key in keys}
    return samples


def error_bound(kind: str, codec: str) -> float:
    error = ERRORS[codec.split(":")[0]]
    return min(1.0, ROOM * ENCODINGS[kind] * error)


def is_wrong(kind: str, codec: str, of_ranks: tuple[Sample, ...]) -> bool:
    too_far = any(not (one.error <= error_bound(kind, codec)) for one in of_ranks)
    differ = kind != "reduce_scatter" and len({one.digest for one in of_ranks}) > 1
    return too_far or differ


def line_share(sent: list[float], s: list[float], rate: str | None) -> float | None:
    """None on loopback, which has no rate."""
    return 8 * measuring.median_ratio(sent, s) / hosts.bits_per_s(rate) if rate else None


def rows_of(size_mb: float, rate: str | None, by_rank: list[Samples]) -> Iterator[Row]:
    rounds = {key: list(zip(*(samples[key] for samples in by_rank))) for key in by_rank[0]}
    slowest = {key: [max(one.s for one in turn) for turn in rounds[key]] for key in rounds}
    for (kind, codec), turns in rounds.items():
        s = slowest[kind, codec]
        sent = [statistics.mean(one.sent for one in turn) for turn in turns]
        yield Row(
            kind=kind,
            codec=codec,
            size_mb=size_mb,
            ranks=len(by_rank),
            link=measuring.link(rate),
            ms=1e3 * statistics.median(s),
            speedup=measuring.median_ratio(slowest[kind, GLOO], s),
            sent_mb=statistics.median(sent) / 1e6,
            line_share=line_share(sent, s, rate),
            error=max(one.error for turn in turns for one in turn),
            wrong=sum(is_wrong(kind, codec, turn) for turn in turns),
        )


def checked(row: Row) -> Iterator[Checked]:
    name = f"{row.kind} {row.codec}, {row.size_mb:g} MB, {row.ranks} ranks, {row.link}"
    for bar in BARS:
        same = (bar.kind, bar.codec, BAR_SIZE_MB) == (row.kind, row.codec, row.size_mb)
        if same and row.link in bar.links and row.ranks in bar.least:
            value = asdict(row)[bar.column]
            yield Checked(f"{name}: {bar.column}", value, bar.least[row.ranks])
    if row.wrong:
        yield Checked(f"{name}: wrong", row.wrong, 0, most=True)


def print_header() -> None:
    columns = f"{'ms':>9} {'speed-up':>9} {'MB sent':>8} {'of line':>8} {'error':>8} {'wrong':>6}"
    print(f"{'':14} {'codec':10} {'MB':>6} {'ranks':>6} {columns}", flush=True)


def print_row(row: Row) -> None:
    share = "–" if row.line_share is None else f"{row.line_share:.2f}"
    what = f"{row.kind:14} {row.codec:10} {row.size_mb:6g} {row.ranks:6}"
    numbers = f"{row.ms:9.1f} {row.speedup:9.2f} {row.sent_mb:8.1f} {share:>8} {row.error:8.1e}"
    print(f"{what} {numbers} {row.wrong:6}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Speed of the collectives, against gloo's, as ratios measured in one run."
    )
    parser.add_argument("--size-mb", type=float, nargs="+", default=[25.0, BAR_SIZE_MB])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--hosts", type=int, nargs="+", help="instead of --ranks: each rank on a host of its own"
    )
    measuring.add_options(parser, rounds=7)
    args = parser.parse_args()
    measuring.check_link(parser, args)
    known = [codec for codec in ERRORS if codec != GLOO]
    unknown = [codec for codec in args.codecs if codec.split(":")[0] not in known]
    if unknown:
        parser.error(f"--codecs: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    return args


def main() -> int:
    args = parse()
    about = measuring.about(link=measuring.link(args.rate), rounds=args.rounds)
    measuring.print_about(about)
    print_header()
    rows: list[Row] = []
    for world_size in args.hosts or args.ranks:
        by_rank = hosts.run(
            world_size,
            measure,
            args.size_mb,
            args.codecs,
            args.rounds,
            hosts=world_size if args.hosts else None,
            rate=args.rate,
        )
        for size_mb in args.size_mb:
            for row in rows_of(size_mb, args.rate, [samples[size_mb] for samples in by_rank]):
                print_row(row)
                rows.append(row)
    bars = [one for row in rows for one in checked(row)]
    return measuring.finish(args, about, rows, bars)


if __name__ == "__main__":
    sys.exit(main())
