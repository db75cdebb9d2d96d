"""Trains a small GPT on the source of Python's standard library, on two ranks of this machine.

Four variants take turns: plain DDP, DDP with int8, DDP with lm4, and ZeRO with lm4 for gradients
and parameters. As root, each rank runs on an emulated host (a network namespace) with a 1 Gbit/s
link; otherwise the ranks share the loopback interface, where sending bytes costs next to nothing.

Prints a table and writes a report: one HTML file that works offline.
"""

import argparse
import json
import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zcomm.cli.demo import report as demo_report
from zcomm.cli.demo.training import LEAST_STEPS, Length, train
from zcomm.launch import hosts
from zcomm.launch.tasks import expect_alone
from zcomm.report import units
from zcomm.report.usage import UsageError, expect_writable, wrapped

HELP = "train a small GPT four ways and compare them, in two minutes"
WORLD_SIZE = 2
DEFAULT_RATE = "1gbit"
LEAST_SECONDS, MOST_SECONDS = 20.0, 1e6
MOST_STEPS = 1_000_000
ENDING_S = 3.0  # to stop the ranks and write the report


@dataclass(frozen=True)
class Link:
    """What connects the ranks: emulated hosts with a rate, or loopback; and why."""

    rate: str | None
    words: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", default="120", help="total running time")
    parser.add_argument("--steps", help="train this many steps instead")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--rate", help="rate of the hosts' links (default: 1gbit); needs root")
    where.add_argument("--loopback", action="store_true", help="no emulated hosts, even as root")
    parser.add_argument("--html", default="zcomm-demo.html", help="the report")
    parser.add_argument("--svg", help="also write the plots as one picture")
    parser.add_argument("--json", help="also write all measurements")


def run(args: argparse.Namespace) -> int:
    start = time.monotonic()
    expect_alone("zcomm demo")
    length = length_of(args, start)
    for file in (args.html, args.svg, args.json):
        if file is not None:
            expect_writable(Path(file))
    link = link_of(args)
    for words in (demo_report.about_training(), link.words, ""):
        print(wrapped(words), file=sys.stderr, flush=True)
    count = WORLD_SIZE if link.rate else None
    options: dict[str, Any] = {"hosts": count, "rate": link.rate, "timeout_s": MOST_SECONDS}
    try:
        by_rank = hosts.run(WORLD_SIZE, train, length, **options)
    except AssertionError as error:  # its message has the rank's traceback
        print(f"zcomm demo: the training failed.\n{error}", file=sys.stderr)
        return 1
    result = demo_report.Result(
        by_rank,
        link=link.words,
        on_loopback=link.rate is None,
        command=shlex.join(["zcomm", *sys.argv[1:]]),
        total_s=time.monotonic() - start,
    )
    print(file=sys.stderr)
    print(f"{result.text_table()}\n\n{wrapped(result.replicas())}")
    write(args, result)
    return 0 if result.identical else 1


def write(args: argparse.Namespace, result: demo_report.Result) -> None:
    if args.json:
        Path(args.json).write_text(json.dumps(result.as_json(), indent=1) + "\n")
    if args.svg:
        Path(args.svg).write_text(result.picture(), encoding="utf-8")
    Path(args.html).write_text(result.page(), encoding="utf-8")
    print(f"Report: {Path(args.html).resolve()}")


def length_of(args: argparse.Namespace, start: float) -> Length:
    steps = None
    if args.steps is not None:
        steps = int(args.steps) if re.fullmatch("[0-9]{1,9}", args.steps) else 0
        if not 1 <= steps <= MOST_STEPS:
            raise UsageError(f"expected --steps from 1 to {MOST_STEPS}, got {args.steps!r}")
    try:
        seconds = float(args.seconds)
    except ValueError:
        seconds = 0.0
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise UsageError(
            f"expected --seconds from {LEAST_SECONDS:g} to {MOST_SECONDS:.0f}, "
            f"got {args.seconds!r}; for a shorter run use --steps, such as --steps {LEAST_STEPS}"
        )
    return Length(steps, start + seconds - ENDING_S)


def link_of(args: argparse.Namespace) -> Link:
    loopback = "The ranks share this machine's loopback interface"
    if args.loopback:
        return Link(None, f"{loopback}, as requested.")
    rate_bits = units.parse_rate(DEFAULT_RATE if args.rate is None else args.rate)
    rate = f"{rate_bits:.0f}bit"
    missing = why_no_hosts(rate)
    if missing and args.rate:
        raise UsageError(f"--rate is not possible here: {missing}; see `zcomm demo --loopback`")
    if missing:
        return Link(None, f"{loopback}: this machine cannot emulate hosts ({missing}).")
    shown = f"{rate_bits / 1e9:g} Gbit/s" if rate_bits >= 1e9 else f"{rate_bits / 1e6:g} Mbit/s"
    words = f"Each rank runs on an emulated host, a network namespace, with a {shown} link."
    return Link(rate, words)


def why_no_hosts(rate: str) -> str:
    """Why hosts cannot be emulated, or "". It tries: root in a container may lack permission."""
    try:
        with hosts.network(1, rate):
            return ""
    except hosts.NoHosts as error:
        return error.why
