"""Tests zcomm's kernels on a device of this machine and prints a report to send.

Compares wires, residuals and sums bit for bit with the reference kernels on the CPU, checks that
damaged wires are refused, trains small models, and measures speed.

Exit code: 0 if everything is correct, 1 if anything is wrong, 2 if the device cannot be used.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from zcomm.codecs import codec
from zcomm.conformance import contract, vectors
from zcomm.report.finding import PROBLEM, Finding, guarded, say, show
from zcomm.report.usage import Paragraphs, UsageError, expect_writable
from zcomm.selftest import damage, device, engine, exactness, graphs, speed
from zcomm.selftest.tally import DO_NOT_TRAIN, Scope


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        scope = _scope(args)
        parts = _parts(args.parts)
        if args.json:
            expect_writable(args.json)
    except UsageError as error:
        print(f"zcomm.selftest: {error}", file=sys.stderr)
        return 2
    environment = device.environment(scope.subject)
    say("\n".join(f"{name:<20}{value}" for name, value in environment.items()))
    found = _found(scope, parts)
    right = all(f.state != PROBLEM for f in found.values())
    if args.json:
        args.json.write_text(_json(environment, found, right) + "\n")
    say("\n" + ("everything is correct" if right else f"something is wrong. {DO_NOT_TRAIN}"))
    return 0 if right else 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zcomm.selftest", description=__doc__, formatter_class=Paragraphs
    )
    add = parser.add_argument
    add("--device", default="cuda", help="cuda (default), cuda:1, cpu")
    add("--kernels", metavar="NAME", help="a kernel set other than the device's default")
    add("--quick", action="store_true", help="fewer cases, smaller tensors")
    add("--codecs", metavar="LIST", help="only these codecs, such as int8,lm4:block=32")
    add("--parts", metavar="LIST", help=f"only these parts of {','.join(PARTS)}")
    add("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    return parser


def _scope(args: argparse.Namespace) -> Scope:
    subject = device.chosen(args.device, args.kernels)
    specs = args.codecs.split(",") if args.codecs else contract.SPECS
    try:
        return Scope(subject, args.quick, tuple(codec(spec).spec for spec in specs))
    except ValueError as error:
        raise UsageError(f"--codecs: {error}") from None


def _parts(text: str | None) -> list[str]:
    names = text.split(",") if text else list(PARTS)
    for name in names:
        if name not in PARTS:
            raise UsageError(f"--parts: expected some of {', '.join(PARTS)}, got {name!r}")
    return names


def _found(scope: Scope, parts: Sequence[str]) -> dict[str, Finding]:
    found = {}
    for name in parts:
        start = time.monotonic()
        finding = guarded(lambda: PARTS[name](scope))  # noqa: B023 (called at once)
        seconds = round(time.monotonic() - start, 1)
        first, *rest = finding.lines
        found[name] = replace(
            finding,
            lines=[f"{first} ({seconds:.1f} s)", *rest],
            details={**finding.details, "seconds": seconds},
        )
        say(show(name, found[name]))
    return found


def _json(environment: dict[str, str], found: dict[str, Finding], right: bool) -> str:
    parts = {name: finding.values() for name, finding in found.items()}
    return json.dumps({"right": right, "environment": environment, "parts": parts}, indent=1)


def _check_vectors(scope: Scope) -> Finding:
    return vectors.check({scope.subject.kernels: scope.subject.device}, DO_NOT_TRAIN)


PARTS: dict[str, Callable[[Scope], Finding]] = {
    "contract": exactness.check_contract,
    "layouts": exactness.check_layouts,
    "damage": damage.check,
    "vectors": _check_vectors,
    "graph": graphs.check,
    "engine": engine.check,
    "speed": speed.check,
}
