"""Measures all_reduce, reduce_scatter and all_gather, with and without codecs.

Starts ranks on this machine: on loopback or, with --hosts, on emulated hosts
behind slow links (needs root).

    zcomm bench --codecs int8 lm4 --max 64M
    zcomm bench --hosts 2 --rate 1gbit

On real hosts it joins the ranks that a launcher starts. HOST is that of rank 0.
Type the first command on every host, one of the others once:

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d \\
             --rdzv-endpoint HOST:29400 -m zcomm bench --max-size 64M
    MASTER_ADDR=HOST MASTER_PORT=29500 srun -n 2 zcomm bench
    mpirun -n 2 -x MASTER_ADDR=HOST -x MASTER_PORT=29500 zcomm bench

(torchrun would take --max for an option of its own.) In every round all codecs
take turns with the backend's own collective, and every result is checked. With
--fit it measures what `zcomm plan` needs to know about this machine instead.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

import zcomm
from zcomm.cli.bench import fit
from zcomm.cli.bench import output as bench_output
from zcomm.cli.bench.collective_rows import Row, rows_of
from zcomm.cli.bench.collective_tasks import FLAT, Key, measure
from zcomm.engine.tuning.cost import KINDS, OWN
from zcomm.launch import launchers, machine
from zcomm.launch.launchers import Launcher
from zcomm.launch.tasks import task
from zcomm.report.units import parse_rate, parse_size
from zcomm.report.usage import UsageError, expect_range, expect_writable

HELP = "measure time, bandwidth and error of collectives, with and without codecs"
CODECS = ("none", "int8", "lm4")
RATE = "1gbit"
# Tensors of the full size: input, result, exact result, and the next rank's input.
TENSORS = 4
MOST_HOSTS = 250  # hosts.py numbers them in the last byte of an address
ON_CPU = ("gloo", "mpi", "ucc")


@dataclass(frozen=True)
class BenchArguments:
    """The checked arguments."""

    sizes: list[int]
    codecs: list[str]
    kinds: list[str]
    backends: list[str]
    ranks: int  # in all
    per_host: int  # on each emulated host
    on_hosts: bool
    rate: str | None
    rounds: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    # torchrun's parser takes --max for an abbreviation of its own --max-restarts.
    add("--min", "--min-size", default="64K", metavar="SIZE", help="smallest tensor, in bytes")
    add("--max", "--max-size", default="256M", metavar="SIZE", help="largest tensor")
    add("--factor", type=int, default=4, help="ratio of one size to the next")
    codecs = "such as lm4, topk:0.01, int8/lm4 with int8 inside hosts, flat/lm4 for one hop"
    add("--codecs", nargs="+", default=CODECS, metavar="C", help=codecs)
    add("--collectives", nargs="+", default=KINDS, metavar="K", help=" ".join(KINDS))
    ranks = "ranks on this machine (default: 2) or, with --hosts, on each host (default: 1)"
    group = "of the process group (default: gloo)"
    add("--backend", nargs="+", default=["gloo"], metavar="B", help=group)
    add("--ranks", type=int, metavar="N", help=ranks)
    add("--hosts", type=int, metavar="N", help="emulate N hosts, with --ranks ranks on each")
    add("--rate", metavar="RATE", help=f"of the hosts' links (default: {RATE})")
    add("--rounds", type=int, default=5, metavar="R", help="rounds to measure")
    add("--json", type=Path, metavar="FILE", help="write all rows as JSON")
    add("--csv", type=Path, metavar="FILE", help="write all rows as CSV")
    add("--html", type=Path, metavar="FILE", help="write an HTML page with plots")
    add("--fit", type=Path, metavar="FILE", help="write a profile for `zcomm plan` instead")


def run(args: argparse.Namespace) -> int:
    wanted = checked(args)
    outputs = [args.json, args.csv, args.html, args.fit]
    for path in filter(None, outputs):
        expect_writable(path)
    if args.fit and any(outputs[:3]):
        raise UsageError("expected --fit alone, got --json, --csv or --html as well; run it twice")
    try:
        with launcher_of(wanted) as launcher:
            if args.fit:
                return fit.run(launcher, wanted.rounds, args.fit)
            return bench(launcher, wanted, args)
    except AssertionError as error:  # from World; its message has the rank's traceback
        print(f"zcomm bench: the ranks failed.\n{error}", file=sys.stderr)
        return 1


def bench(launcher: Launcher, wanted: BenchArguments, args: argparse.Namespace) -> int:
    run = {"ranks": launcher.ranks, "link": launcher.link, "rounds": wanted.rounds}
    about = run | machine.describe(zcomm.__version__)
    output = bench_output.Output(about, wanted.codecs, launcher.leads)
    for row in measured(launcher, wanted, output):
        output.row(row)
    output.write(args.json, args.csv, args.html)
    return output.finish()


def measured(
    launcher: Launcher, wanted: BenchArguments, output: bench_output.Output
) -> Iterator[Row]:
    """Yields rows as they are ready: all codecs of one collective and size at once."""
    for backend in wanted.backends:
        for kind in wanted.kinds:
            output.section(kind, backend)
            keys = [Key(kind, codec) for codec in (OWN, *wanted.codecs)]
            for size in wanted.sizes:
                by_rank = launcher.run(measure, size, keys, wanted.rounds, backend)
                yield from rows_of(size, by_rank, launcher.per_host)


def launcher_of(wanted: BenchArguments) -> AbstractContextManager[Launcher]:
    one = task()
    if one is not None:
        return launchers.joined(one, wanted.backends[0])
    return launchers.local(wanted.ranks, wanted.on_hosts, wanted.rate, wanted.per_host)


def checked(args: argparse.Namespace) -> BenchArguments:
    world_size, here = checked_ranks(args)
    expect_range("--rounds", args.rounds, 1, 1_000_000)
    wanted = BenchArguments(
        sizes=checked_sizes(args.min, args.max, args.factor),
        codecs=checked_codecs(args.codecs),
        kinds=checked_kinds(args.collectives),
        backends=list(dict.fromkeys(map(checked_backend, args.backend))),
        ranks=world_size,
        per_host=args.ranks or 1,
        on_hosts=args.hosts is not None,
        rate=checked_rate(args.rate, args.hosts),
        rounds=args.rounds,
    )
    # Codecs that need feedback keep residuals of what is sent and of what is owned.
    across = [zcomm.codec(Key("", spec).across) for spec in wanted.codecs]
    fed_back = sum(codec.needs_feedback for codec in across)
    tensors = TENSORS + fed_back * (1 + 1 / world_size)
    largest = max(fit.SIZES) if args.fit else wanted.sizes[-1]
    option = "--fit" if args.fit else f"--max {args.max}"
    machine.expect_memory(tensors * largest, here, option)
    return wanted


def checked_ranks(args: argparse.Namespace) -> tuple[int, int]:
    """How many there will be in all, and on this machine."""
    for option, value in (("--ranks", args.ranks), ("--hosts", args.hosts)):
        if value is not None:
            expect_range(option, value, 1, MOST_HOSTS)
    world_size, here = launchers.world_sizes(args.ranks, args.hosts)
    if world_size < 2:
        raise UsageError(f"expected at least 2 ranks, got {world_size}; one sends nothing")
    if args.fit and args.hosts and world_size > args.hosts:
        raise UsageError(
            f"expected one rank per host with --fit, got --ranks {args.ranks}: the model needs a "
            "link that ranks do not share; omit --ranks"
        )
    return world_size, here


def checked_sizes(least: str, most: str, factor: int) -> list[int]:
    first, last = parse_size(least), parse_size(most)
    if first > last:
        raise UsageError(f"expected --min up to --max, got {least} and {most}")
    if first < 4096:
        raise UsageError(f"expected --min of 4K or more, got {least}: errors of less mean nothing")
    if factor < 2:
        raise UsageError(f"expected --factor of 2 or more, got {factor}")
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    return sizes


def checked_codecs(specs: Sequence[str]) -> list[str]:
    try:
        return list(dict.fromkeys(map(checked_codec, specs)))
    except ValueError as error:
        raise UsageError(f"--codecs: {error}") from error


def checked_codec(spec: str) -> str:
    """A codec; local/across with another one inside hosts; flat/across for one hop."""
    key = Key("", spec)
    across = zcomm.codec(key.across).spec
    if key.is_flat:
        return f"{FLAT}/{across}"
    return f"{zcomm.Hierarchy(key.local, across).local}/{across}" if "/" in spec else across


def checked_kinds(names: Sequence[str]) -> list[str]:
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise UsageError(f"--collectives: expected some of {', '.join(KINDS)}, got {unknown[0]!r}")
    return list(dict.fromkeys(names))


def checked_backend(name: str) -> str:
    known = [backend for backend in ON_CPU if dist.is_backend_available(backend)]
    if name not in known:
        why = "sends tensors of GPUs only" if name in ("nccl", "xccl") else "is not in this torch"
        raise UsageError(
            f"--backend: expected one that sends CPU tensors here ({', '.join(known)}), got "
            f"{name!r}, which {why}"
        )
    return name


def checked_rate(rate: str | None, hosts: int | None) -> str | None:
    if rate is not None and hosts is None:
        raise UsageError(f"expected --hosts with --rate, got --rate {rate!r} alone; add --hosts 2")
    if hosts is None:
        return None
    rate = RATE if rate is None else rate
    parse_rate(rate)
    return rate
