"""Estimates memory per rank and time per step before a training run starts.

    zcomm plan --params 7e9 --world 64 --hosts 8 --net 10gbit \\
               --optimizer adamw --dtype bf16 --step-time 0.8 --memory 80G

Compares DDP with ZeRO stage 1 for every codec and marks the row to start with.
Memory is computed by the code that a run uses. Time comes from a model;
`zcomm bench --fit` measures its parameters on your own machine.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zcomm.base import arguments
from zcomm.cli.bench.command import checked_codecs
from zcomm.cli.plan import measured
from zcomm.cli.plan.rows import PlanArguments, PlanRow, recommended, rows_for, why_no_zero
from zcomm.codecs import SPECS
from zcomm.engine.tuning import cost
from zcomm.engine.tuning.cost import OWN, Cluster, Profile, Workload
from zcomm.report.table import whole
from zcomm.report.units import parse_count, parse_rate, parse_size, show_bytes, show_seconds
from zcomm.report.usage import UsageError, expect_range, expect_writable, wrapped

HELP = "estimate memory per rank and time per step for every codec, with DDP and ZeRO"
DTYPES = ("fp32", "bf16", "fp16")
STEP_S = 1.0
MOST_RANKS = 10_000_000
MARK = "*"
MEMORY = ("parameters", "gradients", "optimizer", "masters", "residuals", "buffers", "peak")
MEMORY_HEADINGS = ("param", "grad", "optim", "master", "resid", "buffer", "peak")
SHARED_LINK = (
    "The {0} ranks of a host first sum their gradients in shared memory, exactly. Then each sends "
    "1/{0} of the sums to other hosts: these are the bytes and times of such two hops."
)
TIME_HEADINGS = ("sent", "compute", "hidden", "exposed", "step", "speed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--params", required=True, metavar="N", help="parameters of the model, such as 7e9 or 350M")
    add("--world", type=int, metavar="W", help="number of ranks")
    add("--hosts", type=int, metavar="H", help="number of hosts (default: one per rank)")
    add("--net", default="10gbit", metavar="RATE", help="rate of each host's link")
    add("--optimizer", default="adamw", metavar="NAME", help="an optimizer of torch.optim")
    add("--dtype", default="fp32", metavar="TYPE", help="parameter dtype: fp32, bf16 or fp16")
    add("--step-time", type=float, metavar="S", help="compute seconds per step (default: 1)")
    add("--backward-share", type=float, default=0.67, metavar="P", help="part of that in backward")
    add("--memory", metavar="SIZE", help="memory of a rank, such as 80G; skip rows that need more")
    cores = "cores per host (default: the profile's, or one per rank)"
    add("--cores", type=int, metavar="N", help=cores)
    add("--spare-cores", action="store_true", help="compute runs elsewhere, as on a GPU")
    add("--codecs", nargs="+", default=SPECS, metavar="C", help="codecs to compare (default: all)")
    add("--profile", type=Path, metavar="FILE", help="a profile from `zcomm bench --fit FILE`")
    add("--json", type=Path, metavar="FILE", help="also write the plan as JSON")
    measure = "measure on real ranks what codec='auto' would choose: a launcher's, or --world here"
    add("--measure", action="store_true", help=measure)


def run(args: argparse.Namespace) -> int:
    if args.measure:
        for option in ("json", "memory", "profile", "step_time"):
            if getattr(args, option) is not None:
                name = option.replace("_", "-")
                raise UsageError(f"expected --measure without --{name}, got both; omit one")
        return measured.run(parse_count(args.params), args.world, args.hosts, args.net)
    profile = cost.load(args.profile or cost.DEFAULT_PROFILE)
    wanted = checked(args, profile)
    if args.json:
        expect_writable(args.json)
    try:
        no_zero = why_no_zero(wanted.optimizer)
        rows = rows_for(profile, wanted, with_zero=not no_zero)
    except (ValueError, TypeError) as error:  # from zcomm.plan, written for users
        raise UsageError(str(error)) from error
    best, reason = recommended(rows, wanted.memory)
    print(preface(args, wanted, profile))
    print_tables(rows, best)
    print("\n" + wrapped(reason))
    if no_zero:
        print(wrapped(no_zero))
    if wanted.cluster.ranks_per_link > 1:
        print(wrapped(SHARED_LINK.format(wanted.cluster.ranks_per_link)))
    if args.json:
        written = values(args, wanted, profile, rows, best, reason)
        args.json.write_text(json.dumps(written, indent=2) + "\n")
        print(f"wrote {args.json}")
    return 0 if best is not None else 1


def checked(args: argparse.Namespace, profile: Profile) -> PlanArguments:
    if args.world is None:
        raise UsageError("expected --world, the number of ranks, got none")
    expect_range("--world", args.world, 1, MOST_RANKS)
    hosts = args.world if args.hosts is None else args.hosts
    expect_range("--hosts", hosts, 1, MOST_RANKS)
    if args.world % hosts:
        raise UsageError(
            f"expected --world as a multiple of --hosts, got {args.world} ranks on {hosts} hosts"
        )
    if args.dtype not in DTYPES:
        raise UsageError(f"--dtype: expected one of {', '.join(DTYPES)}, got {args.dtype!r}")
    step_s = STEP_S if args.step_time is None else args.step_time
    expect_range("--step-time", step_s, 1e-6, 1_000_000)
    if not 0 < args.backward_share < 1:
        raise UsageError(f"expected --backward-share between 0 and 1, got {args.backward_share}")
    per_host = args.world // hosts
    cores = (profile.cores if args.profile else per_host) if args.cores is None else args.cores
    expect_range("--cores", cores, 1, MOST_RANKS)
    bytes_per_s = parse_rate(args.net) / 8 * profile.efficiency
    itemsize = arguments.dtype_of(args.dtype, "dtype").itemsize
    work = (itemsize, step_s, args.backward_share, not args.spare_cores)
    return PlanArguments(
        args.dtype,
        args.optimizer,
        Workload(parse_count(args.params), *work),
        Cluster(args.world, per_host, per_host, cores, bytes_per_s),
        one_hop(checked_codecs(args.codecs)),
        None if args.memory is None else parse_size(args.memory),
        hosts,
        args.net,
    )


def one_hop(codecs: list[str]) -> list[str]:
    for spec in codecs:
        if "/" in spec:
            raise UsageError(
                f"--codecs: expected codecs of one hop, got {spec!r}; hosts with several ranks sum "
                "exactly inside"
            )
    return codecs


def preface(args: argparse.Namespace, wanted: PlanArguments, profile: Profile) -> str:
    cluster, workload = wanted.cluster, wanted.workload
    assumed = " (assumed; set --step-time)" if args.step_time is None else ""
    what = (
        f"{workload.numel:,} parameters in {wanted.dtype}, {wanted.optimizer}, "
        f"{cluster.world_size} ranks on {wanted.hosts} hosts ({wanted.net}, {cluster.cores} cores "
        f"each). A step computes for {show_seconds(workload.step_s)}{assumed}, "
        f"{workload.backward_share:.0%} of it in backward."
    )
    if args.profile:
        origin = f"{args.profile}, fitted on {where(profile)}"
    else:
        origin = (
            f"built in, fitted on {where(profile)}. Your machine may differ a lot: run "
            "`zcomm bench --fit profile.json`, then use `--profile profile.json`"
        )
    model = f"Times come from a model, not from measurements. Profile: {origin}."
    return "\n".join(wrapped(text) for text in (what, model))


def where(profile: Profile) -> str:
    about = profile.about
    return f"{about['cpu']} ({about['isa']}), {about['ranks']} ranks, {about['link']}"


def print_tables(rows: list[PlanRow], best: PlanRow | None) -> None:
    names = [f"{MARK if row is best else ' '} {row.name}" for row in rows]
    memory = [
        [name, *(short_bytes(getattr(row.memory, part)) for part in MEMORY)]
        for name, row in zip(names, rows)
    ]
    print("\nMemory per rank, not counting activations")
    print(whole(("  strategy", *MEMORY_HEADINGS), memory))
    first = rows[0].time.step_s
    times = [[name, *time_cells(row, first)] for name, row in zip(names, rows)]
    print("\nTime per step (modeled). sent: bytes per rank; speed: relative to DDP alone")
    print(whole(("  strategy", *TIME_HEADINGS), times))


def short_bytes(nbytes: int) -> str:
    return show_bytes(nbytes).replace(" ", "").removesuffix("B") if nbytes else "–"


def time_cells(row: PlanRow, first_s: float) -> list[str]:
    time = row.time
    seconds = (time.compute_s, time.hidden_s, time.exposed_s, time.step_s)
    return [show_bytes(row.sent), *map(show_seconds, seconds), f"{first_s / time.step_s:.2f}×"]


def values(
    args: argparse.Namespace,
    wanted: PlanArguments,
    profile: Profile,
    rows: list[PlanRow],
    best: PlanRow | None,
    reason: str,
) -> dict[str, Any]:
    return {
        "is": "a model, not a measurement",
        "profile": {"origin": str(args.profile or "built in"), "about": profile.about},
        "parameters": wanted.workload.numel,
        "dtype": wanted.dtype,
        "optimizer": wanted.optimizer,
        "hosts": wanted.hosts,
        "cluster": wanted.cluster._asdict(),
        "training": wanted.workload._asdict(),
        "memory_bytes": wanted.memory,
        "rows": [row_values(row) for row in rows],
        "recommended": best.name if best else None,
        "reason": reason,
    }


def row_values(row: PlanRow) -> dict[str, Any]:
    codec = None if row.strategy.codec == OWN else row.strategy.codec
    memory = asdict(row.memory) | {"total": row.memory.total, "peak": row.memory.peak}
    return {
        "name": row.name,
        "stage": row.strategy.stage,
        "codec": codec,
        "gather_codec": row.strategy.gather_codec,
        "memory_bytes": memory,
        "sent_bytes": round(row.sent),
        "time_s": row.time._asdict() | {"step_s": row.time.step_s},
    }
