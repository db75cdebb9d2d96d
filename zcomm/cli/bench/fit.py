"""`zcomm bench --fit`: measures this machine and fits the cost model to it.

Codecs, messages and the link are timed alone. The rest comes from collectives of a few sizes and
codecs: their CPU time gives the cost of a byte and of a chunk, their wall time gives latency and
overlap.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zcomm
from zcomm.cli.bench.collective_rows import Row, rows_of
from zcomm.cli.bench.collective_tasks import Key, Timings, measure
from zcomm.codecs import SPECS
from zcomm.launch import machine
from zcomm.launch.launchers import LOOPBACK, Launcher
from zcomm.planning import cost
from zcomm.planning.codec_costs import CodecCost, measure_costs
from zcomm.planning.cost import KINDS, OWN, Cluster, Profile
from zcomm.report.table import whole
from zcomm.report.units import parse_rate, show_bytes, show_rate, show_seconds

# Enough sizes to separate latency, bandwidth and codec.
SIZES = (64 << 10, 8 << 20, 32 << 20, 64 << 20)
CODECS = ("none", "int8", "lm4")
REPEATED = 5
MESSAGES = 100
MESSAGE_NBYTES, IN_FLIGHT = 1 << 20, 16


def run(launcher: Launcher, rounds: int, path: Path) -> int:
    """Fits and writes a profile, and shows how well it matches the measurements."""

    def say(text: str) -> None:
        if launcher.leads:
            print(text, flush=True)

    say(f"Measuring {launcher.ranks} ranks, {launcher.link}: codecs, messages, collectives.")
    profile, rows = fitted(launcher, rounds)
    if launcher.leads:
        cost.save(profile, path)
    say(summary(profile))
    say(comparison(profile, rows))
    say(f"wrote {path}; use it with `zcomm plan --profile {path}`")
    return 1 if any(row.wrong for row in rows) else 0


def fitted(
    launcher: Launcher, rounds: int, codecs: Sequence[str] = CODECS
) -> tuple[Profile, list[Row]]:
    """A profile of these ranks, and the rows it was fitted to."""
    by_rank = launcher.run(measure_costs, list(SPECS))
    costs = {spec: max(costs[spec] for costs in by_rank) for spec in SPECS}  # of the slowest rank
    message_s = max(launcher.run(measure_message))
    bytes_per_s = min(launcher.run(measure_bandwidth))
    rows: list[Row] = []
    for size in SIZES:
        keys = [Key(kind, codec) for kind in KINDS for codec in (OWN, *codecs)]
        rows += rows_of(size, launcher.run(measure_over_gloo, size, keys, rounds))
    about = machine.describe(zcomm.__version__) | {"ranks": launcher.ranks, "link": launcher.link}
    return profile_of(rows, costs, message_s, bytes_per_s, about), rows


def measure_over_gloo(
    rank: int, world_size: int, nbytes: int, keys: Sequence[Key], rounds: int
) -> Timings:
    """Runs on every rank: as between hosts, which the model is of. Ranks of one host would share
    memory."""
    os.environ["ZCOMM_SHM"] = "0"
    return measure(rank, world_size, nbytes, keys, rounds, "gloo")


def measure_message(rank: int, world_size: int) -> float:
    """Runs on every rank: CPU time of one more message, sent and received."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    mine, theirs = torch.zeros(1), torch.zeros(1)
    seconds = []
    for _ in range(REPEATED):
        start = time.process_time()
        works = [
            work
            for _ in range(MESSAGES)
            for work in (dist.irecv(theirs, before), dist.isend(mine, after))
        ]
        for work in works:
            assert work is not None
            work.wait()
        seconds.append((time.process_time() - start) / MESSAGES)
    return min(seconds)


def measure_bandwidth(rank: int, world_size: int) -> float:
    """Runs on every rank: bytes per second, in messages like the engine's."""
    mine = torch.zeros(MESSAGE_NBYTES * world_size, dtype=torch.uint8)
    theirs = [torch.zeros_like(mine) for _ in range(IN_FLIGHT)]
    rates = []
    for _ in range(REPEATED):
        dist.barrier()
        start = time.perf_counter()
        works = [dist.all_to_all_single(out, mine, async_op=True) for out in theirs]
        for work in works:
            assert work is not None
            work.wait()
        s = time.perf_counter() - start
        rates.append(MESSAGE_NBYTES * (world_size - 1) * IN_FLIGHT / s)
    return statistics.median(rates)


def profile_of(
    rows: Sequence[Row],
    costs: dict[str, CodecCost],
    message_s: float,
    bytes_per_s: float,
    about: dict[str, Any],
) -> Profile:
    """Fits the parameters, from one kind of measurement after the other."""
    profile = Profile(
        about=about,
        cores=os.cpu_count() or 1,
        latency_s=1e-3,
        chunk_s=2e-4,
        message_s=message_s,
        wire_s=1e-9,
        unhidden=0.3,
        bytes_per_s=bytes_per_s,
        efficiency=cost.USUAL_EFFICIENCY,
        own_step_s=2e-4,
        own_wire_s=1e-9,
        codecs=costs,
    )
    coded = [row for row in rows if row.codec != OWN]
    own = [row for row in rows if row.codec == OWN and row.kind == "all_reduce"]
    profile = closest(profile, ("chunk_s", "wire_s"), coded, predicted_cpu_s, lambda row: row.cpu_s)
    profile = closest(profile, ("latency_s", "unhidden"), coded, predicted_s, lambda row: row.s)
    largest = max(own, key=lambda row: row.nbytes)
    profile = replace(profile, own_wire_s=largest.cpu_s / largest.wire_nbytes)
    profile = closest(profile, ("own_step_s",), own, predicted_s, lambda row: row.s)
    if about["link"] != LOOPBACK and about["link"].endswith("bit"):
        nominal = parse_rate(about["link"]) / 8
        profile = replace(profile, efficiency=min(profile.bytes_per_s / nominal, 1.0))
    return profile


def predicted_s(profile: Profile, row: Row) -> float:
    # Each rank has its own link, and all are on this machine.
    cluster = Cluster(row.ranks, 1, row.ranks, profile.cores, profile.bytes_per_s)
    return cost.estimate(profile, row.kind, row.nbytes // 4, row.codec, cluster).s


def predicted_cpu_s(profile: Profile, row: Row) -> float:
    load = cost.load_of(row.kind, row.nbytes // 4, row.codec, row.ranks)
    return sum(cost.cpu_parts(profile, load))


def closest(
    profile: Profile,
    names: Sequence[str],
    rows: Sequence[Row],
    predict: Callable[[Profile, Row], float],
    measured: Callable[[Row], float],
) -> Profile:
    """Changes the named parameters so that predictions are closest, as ratios.

    A pattern search: it tries each parameter times and divided by a factor, which shrinks when
    neither helps. There are few parameters and rows, and all parameters stay above 0.
    """

    def off(candidate: Profile) -> float:
        # Not squared, so that one disturbed row does not pull the others.
        return sum(abs(math.log(predict(candidate, row) / measured(row))) for row in rows)

    best, least, factor = profile, off(profile), 4.0
    while factor > 1.005:
        tried = [changed(best, name, by) for name in names for by in (factor, 1 / factor)]
        scores = [off(candidate) for candidate in tried]
        if min(scores) < least:
            least = min(scores)
            best = tried[scores.index(least)]
        else:
            factor = math.sqrt(factor)
    return best


def changed(profile: Profile, name: str, factor: float) -> Profile:
    value = getattr(profile, name) * factor
    return replace(profile, **{name: min(value, 1.0) if name == "unhidden" else value})


def summary(profile: Profile) -> str:
    facts = [
        ("latency", show_seconds(profile.latency_s)),
        ("bandwidth", show_rate(profile.bytes_per_s)),
        ("not hidden", f"{100 * profile.unhidden:.0f}% of the shorter of link and CPU time"),
        ("CPU time", f"{show_seconds(profile.chunk_s)} per chunk and hop"),
        ("", f"{show_seconds(profile.message_s)} per message"),
        ("", f"{1e9 * profile.wire_s:.2f} ns per byte, sent and received"),
    ]
    for spec, one in profile.codecs.items():
        sums = f"{1e9 * one.summed_s(2):.2f} decode_sum of 2"
        times = f"{1e9 * one.encode_s:.2f} encode, {1e9 * one.decode_s:.2f} decode, {sums}"
        facts.append((spec, f"{times} (ns per element)"))
    return "\n".join(f"  {name:<10}  {fact}" for name, fact in facts)


def comparison(profile: Profile, rows: Sequence[Row]) -> str:
    cells = []
    for row in (row for row in rows if row.codec != OWN):
        model_s = predicted_s(profile, row)
        off = f"{100 * (model_s / row.s - 1):+.0f}%"
        times = [show_seconds(row.s), show_seconds(model_s), off]
        cells.append([row.kind, show_bytes(row.nbytes), row.codec, *times])
    return whole(("collective", "size", "codec", "measured", "model", "off"), cells, left=3)
