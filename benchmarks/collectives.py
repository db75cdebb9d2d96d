"""How fast the compressed collectives are, compared with gloo's fp32 collectives.

Measures and checks like `zcomm bench` (collective_tasks.py and collective_rows.py in
zcomm/cli/bench). In addition, all collectives of one size take turns, bytes are counted at the
network interface, and --check enforces bars.

    share of the line rate = bytes sent at the interface / time / rate

Usage: python benchmarks/collectives.py [--size-mb 0.001 25 100] [--ranks 2 4]
       [--codecs none int8 lm4] [--hosts 2 4 --rate 1gbit [--ranks-per-host 2]] [--rounds R]
       [--check] [--json F]

With several ranks per host there are also rows with two hops, named local/across. Bytes at the
interface are those that cross between hosts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

import measuring
from measuring import LOOPBACK, Checked
from zcomm.cli.bench.collective_rows import median_ratio, rows_of
from zcomm.cli.bench.collective_tasks import Key, measure
from zcomm.codecs import KNOWN
from zcomm.engine.tuning.cost import KINDS, OWN
from zcomm.launch import hosts, launchers
from zcomm.launch.launchers import Launcher
from zcomm.report.units import parse_rate

GLOO = "gloo"


class Bar(NamedTuple):
    """A floor for one column of a row of one size, by number of ranks."""

    kind: str
    codec: str
    column: str
    links: tuple[str, ...]
    least: dict[int, float]
    size_mb: float = 100.0


GIGABIT = "1gbit"
BARS = (
    Bar("all_reduce", "none", "speedup", (LOOPBACK,), {2: 5.0, 4: 4.0}),
    Bar("all_reduce", "int8", "speedup", (LOOPBACK,), {2: 3.0, 4: 2.5}),
    Bar("all_reduce", "lm4", "speedup", (LOOPBACK,), {2: 1.5, 4: 1.5}),
    Bar("reduce_scatter", "none", "speedup", (LOOPBACK,), {2: 7.0, 4: 6.0}),
    Bar("all_gather", "none", "speedup", (LOOPBACK,), {2: 7.0, 4: 6.0}),
    Bar("all_reduce", "none", "speedup", (LOOPBACK,), {2: 4.5, 4: 2.5}, size_mb=25.0),
    Bar("all_reduce", "none", "speedup", (LOOPBACK,), {2: 1.0, 4: 1.0}, size_mb=0.001),
    Bar("all_reduce", "lm4", "speedup", (LOOPBACK,), {2: 1.0, 4: 1.0}, size_mb=0.001),
    Bar("reduce_scatter", "none", "speedup", (GIGABIT,), {2: 1.8, 4: 1.8}),
    Bar("all_reduce", "lm4", "speedup", (GIGABIT,), {2: 6.0, 4: 5.0}),
    Bar("all_reduce", "lm4", "line_share", (GIGABIT,), {2: 0.80, 4: 0.65}),
    Bar("all_reduce", "none", "speedup", (GIGABIT,), {2: 1 / 1.2, 4: 1 / 1.2}, size_mb=0.001),
)
LARGE_MB = 100.0
ONE_HOP = "flat/lm4"
TWO_HOPS = ("lm4", "int8/lm4", "int4/lm4")
# For the best local codec, with two ranks on each of two hosts.
LEAST_SPEEDUP, MOST_BYTES = 1.4, 0.55


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
    per_host: int | None
    against_one_hop: float  # speedup over one hop with lm4
    sent_of_one_hop: float  # bytes, as a fraction of one hop's


def measured(launcher: Launcher, size_mb: float, args: argparse.Namespace) -> Iterator[Row]:
    size = int(size_mb * 1e6)
    keys = [Key(kind, codec) for kind in KINDS for codec in (OWN, *args.codecs)]
    arguments = (size, keys, args.rounds, GLOO, hosts.sent_bytes)
    by_rank = launcher.run(measure, *arguments)
    rows = list(rows_of(size, by_rank, launcher.per_host))
    one_hop = {row.kind: row for row in rows if row.codec == ONE_HOP}
    for row in rows:
        base = one_hop.get(row.kind, row)
        yield Row(
            kind=row.kind,
            codec=row.codec or GLOO,
            size_mb=size_mb,
            ranks=row.ranks,
            link=measuring.link(args.rate),
            ms=1e3 * row.s,
            speedup=row.speedup,
            sent_mb=statistics.median(row.sent) / 1e6,
            line_share=line_share(row.sent, row.seconds, args.rate),
            error=row.error,
            wrong=row.wrong,
            per_host=launcher.per_host if args.hosts else None,
            against_one_hop=median_ratio(base.seconds, row.seconds),
            sent_of_one_hop=median_ratio(row.sent, base.sent),
        )


def line_share(sent: list[float], s: list[float], rate: str | None) -> float | None:
    """None on loopback, which has no rate."""
    return 8 * median_ratio(sent, s) / parse_rate(rate) if rate else None


def checked(row: Row) -> Iterator[Checked]:
    name = f"{row.kind} {row.codec}, {row.size_mb:g} MB, {row.ranks} ranks, {row.link}"
    for bar in BARS:
        same = (bar.kind, bar.codec, bar.size_mb) == (row.kind, row.codec, row.size_mb)
        same = same and row.per_host in (None, 1)
        if same and row.link in bar.links and row.ranks in bar.least:
            value = asdict(row)[bar.column]
            yield Checked(f"{name}: {bar.column}", value, bar.least[row.ranks])
    if row.wrong:
        yield Checked(f"{name}: wrong", row.wrong, 0, most=True)


def checked_hops(rows: list[Row]) -> Iterator[Checked]:
    """Compares two hops with one: the fastest local codec, and the most bytes of any."""
    two = [
        row
        for row in rows
        if row.codec in TWO_HOPS
        and (row.kind, row.size_mb, row.link) == ("all_reduce", LARGE_MB, GIGABIT)
        and (row.ranks, row.per_host) == (4, 2)
    ]
    if two:
        best = max(two, key=lambda row: row.against_one_hop)
        name = f"all_reduce {best.codec}, 2 x 2 ranks, against one hop of {ONE_HOP}"
        yield Checked(f"{name}: speed", best.against_one_hop, LEAST_SPEEDUP)
        most = max(row.sent_of_one_hop for row in two)
        yield Checked("two hops, 2 x 2 ranks: bytes between hosts", most, MOST_BYTES, most=True)


def print_header() -> None:
    columns = f"{'ms':>9} {'speed-up':>9} {'MB sent':>8} {'of line':>8} {'error':>8} {'wrong':>6}"
    columns += f" {'x one hop':>9} {'its bytes':>9}"
    print(f"{'':14} {'codec':10} {'MB':>6} {'ranks':>6} {columns}", flush=True)


def print_row(row: Row) -> None:
    share = "–" if row.line_share is None else f"{row.line_share:.2f}"
    what = f"{row.kind:14} {row.codec:10} {row.size_mb:6g} {row.ranks:6}"
    numbers = f"{row.ms:9.1f} {row.speedup:9.2f} {row.sent_mb:8.1f} {share:>8} {row.error:8.1e}"
    hops = f"{row.against_one_hop:9.2f} {row.sent_of_one_hop:9.2f}" if "/" in row.codec else ""
    print(f"{what} {numbers} {row.wrong:6} {hops}".rstrip(), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Speed of the collectives, against gloo's, as ratios measured in one run."
    )
    parser.add_argument("--size-mb", type=float, nargs="+", default=[0.001, 25.0, LARGE_MB])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--hosts", type=int, nargs="+", help="instead of --ranks: ranks on hosts of their own"
    )
    parser.add_argument("--ranks-per-host", type=int, default=1, help="with --hosts")
    measuring.add_options(parser, rounds=7)
    args = parser.parse_args()
    measuring.check_link(parser, args)
    known = list(KNOWN)
    if args.ranks_per_host > 1:
        args.codecs = list(dict.fromkeys([*args.codecs, ONE_HOP, *TWO_HOPS]))
    specs = [one for codec in args.codecs for one in codec.split("/")]
    unknown = [spec for spec in specs if spec.split(":")[0] not in known]
    if unknown:
        parser.error(f"--codecs: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    return args


def main() -> int:
    args = parse()
    about = measuring.about(link=measuring.link(args.rate), rounds=args.rounds)
    measuring.print_about(about)
    print_header()
    rows: list[Row] = []
    per_host = args.ranks_per_host
    for count in args.hosts or args.ranks:
        world_size = count * per_host if args.hosts else count
        with launchers.local(world_size, bool(args.hosts), args.rate, per_host) as launcher:
            for size_mb in args.size_mb:
                for row in measured(launcher, size_mb, args):
                    print_row(row)
                    rows.append(row)
    bars = [*(one for row in rows for one in checked(row)), *checked_hops(rows)]
    return measuring.finish(args, about, rows, bars)


if __name__ == "__main__":
    sys.exit(main())
