"""What the benchmarks that run several ranks share: options, medians, bars, tables, JSON."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zcomm
from zcomm.launch import hosts, machine
from zcomm.report.units import parse_rate
from zcomm.report.usage import UsageError

LOOPBACK = "loopback"


@dataclass(frozen=True)
class Checked:
    """A measured value and its bar: the least it may be, or the most."""

    name: str
    measured: float
    bar: float
    most: bool = False

    @property
    def missed(self) -> bool:
        # Written so that NaN is a miss.
        return not (self.measured <= self.bar if self.most else self.measured >= self.bar)

    def __str__(self) -> str:
        words = f"{self.name}: {self.measured:.3g}, bar: at {'most' if self.most else 'least'}"
        return f"{words} {self.bar:g}{'  MISSED' if self.missed else ''}"


def add_options(
    parser: argparse.ArgumentParser, rounds: int, codecs: Sequence[str] = ("none", "int8", "lm4")
) -> None:
    parser.add_argument(
        "--codecs", nargs="*", default=list(codecs), help="may be empty: torch's rows"
    )
    parser.add_argument("--rate", help="of the hosts' links, in the words of tc: 1gbit")
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds whose median counts")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")


def check_link(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if bool(args.hosts) != bool(args.rate):
        parser.error("expected --hosts and --rate, or neither")
    try:
        parse_rate(args.rate or "1gbit")
        if args.hosts:
            hosts.require_tools()
    except UsageError as error:
        parser.error(str(error))


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    check_link(parser, args)
    return args


def begin(
    args: argparse.Namespace, **settings: Any
) -> tuple[int, str, dict[str, Any], dict[str, Any]]:
    """Ranks, the link's name, where hosts.run() starts them, and the heading, which it prints."""
    ranks, where = args.hosts or args.ranks, {"hosts": args.hosts, "rate": args.rate}
    described = about(
        link=link(args.rate), ranks=ranks, rounds=args.rounds, steps=args.steps, **settings
    )
    print_about(described)
    return ranks, link(args.rate), where, described


def link(rate: str | None) -> str:
    return rate.lower() if rate else LOOPBACK


def print_about(about: dict[str, Any]) -> None:
    print(" · ".join(f"{key} {value}" for key, value in about.items()), flush=True)


def finish(
    args: argparse.Namespace, about: dict[str, Any], rows: Sequence[Any], checked: list[Checked]
) -> int:
    """Prints the bars, writes the JSON and gives the exit code."""
    for one in checked:
        print(one)
    if args.json:
        results = {
            "rows": [asdict(row) for row in rows],
            "bars": [asdict(one) | {"missed": one.missed} for one in checked],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(about | results, indent=2) + "\n")
    return 1 if args.check and any(one.missed for one in checked) else 0


def about(**settings: Any) -> dict[str, Any]:
    return machine.describe(zcomm.__version__) | {"commit": commit()} | settings


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
