"""How well the cost model of `zcomm plan` predicts collectives it was not fitted to.

Fits a profile with two hosts, as `zcomm bench --fit` does, then compares its predictions with
measurements on two and four hosts, at sizes outside the fit. The fit includes collectives with
none, int8 and lm4 at other sizes; for other codecs it knows only the cost of encode and decode.
All hosts share this machine's processor, and the model accounts for that.

    off = predicted / measured − 1

Usage: python benchmarks/cost_model.py [--hosts 2 4] [--rate 1gbit] [--size-mb 12 50 100]
       [--codecs none bf16 int8 int4 lm4 lm3] [--rounds R] [--check] [--json F] [--write-default]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import measuring
from measuring import Checked
from zcomm.cli.bench import fit
from zcomm.cli.bench.collective_rows import rows_of
from zcomm.cli.bench.collective_tasks import Key, measure
from zcomm.engine.tuning import cost
from zcomm.engine.tuning.cost import KINDS, OWN, Profile
from zcomm.engine.tuning.fit import predicted_s as predicted_s_of
from zcomm.launch import launchers

FIT_HOSTS = 2
MOST_OFF = 0.25
CODECS = ("none", "bf16", "int8", "int4", "lm4", "lm3")


@dataclass(frozen=True)
class Row:
    kind: str
    codec: str
    size_mb: float
    hosts: int
    measured_ms: float
    predicted_ms: float
    spread: float  # of the measured rounds

    @property
    def off(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def rows_for(profile: Profile, hosts: int, args: argparse.Namespace) -> Iterator[Row]:
    with launchers.local(hosts, True, args.rate) as launcher:
        for size_mb in args.size_mb:
            size = round(size_mb * 1e6)
            keys = [Key(kind, codec) for kind in KINDS for codec in (OWN, *args.codecs)]
            for row in rows_of(size, launcher.run(measure, size, keys, args.rounds, "gloo")):
                if row.codec == OWN and row.kind != "all_reduce":
                    continue  # the model only has the backend's all_reduce, which DDP uses
                cluster = fit.cluster_of(row.ranks, profile.bytes_per_s)
                predicted_s = predicted_s_of(profile, row, cluster)
                name = row.codec or "gloo"
                yield Row(
                    row.kind, name, size_mb, hosts, 1e3 * row.s, 1e3 * predicted_s, row.spread
                )


def print_row(row: Row) -> None:
    what = f"{row.kind:14} {row.codec:10} {row.size_mb:6g} {row.hosts:6}"
    times = f"{row.measured_ms:9.1f} ±{row.spread:4.0%} {row.predicted_ms:10.1f} {row.off:+7.0%}"
    print(f"{what} {times}", flush=True)


def checked(row: Row) -> Checked:
    name = f"{row.kind} {row.codec}, {row.size_mb:g} MB, {row.hosts} hosts: prediction off by"
    return Checked(name, abs(row.off), MOST_OFF, most=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Predictions of the cost model, against what is measured."
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size-mb", type=float, nargs="+", default=[12.0, 50.0, 100.0])
    parser.add_argument("--profile", type=Path, help="predict with this one, without a fit")
    parser.add_argument("--write-default", action="store_true", help="keep the fit in the package")
    measuring.add_options(parser, rounds=7, codecs=CODECS)
    parser.set_defaults(rate="1gbit")
    args = parser.parse_args()
    measuring.check_link(parser, args)
    return args


def main() -> int:
    args = parse()
    about = measuring.about(link=args.rate, fitted_with=FIT_HOSTS, rounds=args.rounds)
    measuring.print_about(about)
    if args.profile:
        profile = cost.load(args.profile)
    else:
        with launchers.local(FIT_HOSTS, True, args.rate) as launcher:
            profile, _ = fit.fitted(launcher, args.rounds)
    print(fit.summary(profile))
    if args.write_default:
        cost.save(profile, cost.DEFAULT_PROFILE)
        print(f"wrote {cost.DEFAULT_PROFILE}")
    print(
        f"{'':14} {'codec':10} {'MB':>6} {'hosts':>6} {'ms':>9} {'':5} {'model ms':>10} {'off':>7}"
    )
    rows = []
    for hosts in args.hosts:
        for row in rows_for(profile, hosts, args):
            print_row(row)
            rows.append(row)
    return measuring.finish(args, about, rows, [checked(row) for row in rows])


if __name__ == "__main__":
    sys.exit(main())
