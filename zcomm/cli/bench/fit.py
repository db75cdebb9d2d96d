"""`zcomm bench --fit`: measures this machine and fits the cost model to it.

Codecs, messages and the link are timed alone. The rest comes from collectives of a few sizes and
codecs: their CPU time gives the cost of a byte and of a chunk, their wall time gives latency and
overlap.
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import zcomm
from zcomm.cli.bench.collective_rows import Row, rows_of
from zcomm.cli.bench.collective_tasks import Key, Timings, measure
from zcomm.codecs import SPECS
from zcomm.engine.tuning import cost, fit
from zcomm.engine.tuning.codec_costs import measure_costs
from zcomm.engine.tuning.cost import KINDS, OWN, Cluster, Profile
from zcomm.launch import machine
from zcomm.launch.launchers import LOOPBACK, Launcher
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
    cluster = cluster_of(launcher.ranks, bytes_per_s)
    profile = fit.profile_of(rows, costs, message_s, about, cluster)
    if launcher.link != LOOPBACK and launcher.link.endswith("bit"):
        nominal = parse_rate(launcher.link) / 8
        profile = replace(profile, efficiency=min(bytes_per_s / nominal, 1.0))
    return profile, rows


def cluster_of(ranks: int, bytes_per_s: float) -> Cluster:
    """Each rank has its own link, and all are on this machine."""
    return Cluster(ranks, 1, ranks, os.cpu_count() or 1, bytes_per_s)


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
        model_s = fit.predicted_s(profile, row, cluster_of(row.ranks, profile.bytes_per_s))
        off = f"{100 * (model_s / row.s - 1):+.0f}%"
        times = [show_seconds(row.s), show_seconds(model_s), off]
        cells.append([row.kind, show_bytes(row.nbytes), row.codec, *times])
    return whole(("collective", "size", "codec", "measured", "model", "off"), cells, left=3)
