"""What the benchmarks share: options, bars, tables, and the JSON of the published results."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
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
    """The options of benchmarks that run several ranks."""
    parser.add_argument(
        "--codecs", nargs="*", default=list(codecs), help="none given: only torch's own rows"
    )
    parser.add_argument("--rate", help="rate of each host's link, as tc writes it: 1gbit")
    add_output_options(parser, rounds)


def add_output_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument("--rounds", type=int, default=rounds, help="report medians of this many")
    parser.add_argument("--json", type=Path, help="write the results to this file")
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
    """The number of ranks, the link's name, arguments for hosts.run(), and the heading.

    Prints the heading.
    """
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
    """Prints the bars, writes the JSON and returns the exit code."""
    for one in checked:
        print(one)
    write_json(
        args.json, about, rows, bars=[asdict(one) | {"missed": one.missed} for one in checked]
    )
    return 1 if args.check and any(one.missed for one in checked) else 0


def write_json(
    path: Path | None, about: dict[str, Any], rows: Sequence[Any], **more: Sequence[Any]
) -> None:
    """Writes what tools/make_result_tables.py reads. Without a path, does nothing."""
    if path is None:
        return
    results = about | {"rows": [asdict(row) for row in rows]} | more
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")


def about(**settings: Any) -> dict[str, Any]:
    described = machine.describe(zcomm.__version__)
    return described | {"commit": commit(), "command": command()} | settings


def commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command() -> str:
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """As markdown."""
    for row in [head, ["---"] * len(head), *rows]:
        print("| " + " | ".join(row) + " |")
