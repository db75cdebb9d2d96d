"""The rows of `zcomm plan`: every way to train with zcomm, and which of them to start with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from zcomm.cli.bench.collective_rows import ERRORS
from zcomm.planning import cost
from zcomm.planning.cost import OWN, Cluster, Profile
from zcomm.planning.memory import MemoryPlan
from zcomm.planning.step_cost import StepTime, Training, Way, step_time
from zcomm.report.units import show_bytes
from zcomm.sharding.feedback import NEEDS_FEEDBACK

# Steps that differ by less than the model can know are equally fast.
TIE = 1.02
# What gathers parameters of a dtype exactly.
EXACT = {"fp32": "none", "bf16": "bf16", "fp16": "fp16"}


class PlanRow(NamedTuple):
    way: Way
    exact: bool  # parameters are what the optimizer made of them
    memory: MemoryPlan
    time: StepTime
    sent: float

    @property
    def name(self) -> str:
        if self.way.codec == OWN:
            return "DDP alone"
        if not self.way.stage:
            return f"DDP {self.way.codec}"
        return f"ZeRO {self.way.codec}" + ("" if self.exact else f"+{self.way.gather_codec}")

    @property
    def error(self) -> tuple[float, float]:
        """For comparison: of gradients, then of parameters."""
        gathered = 0.0 if self.exact else error_of(self.way.gather_codec or OWN)
        return error_of(self.way.codec), gathered


def error_of(spec: str) -> float:
    return ERRORS[spec.split(":")[0]]


def needs_feedback(spec: str) -> bool:
    return spec.split(":")[0] in NEEDS_FEEDBACK


def rows_for(
    profile: Profile,
    training: Training,
    cluster: Cluster,
    codecs: Sequence[str],
    dtype: str,
    plan: Callable[..., MemoryPlan],
) -> list[PlanRow]:
    """DDP alone; DDP with each codec; ZeRO with each, and parameters exact or in the same codec."""
    exact = EXACT[dtype]

    def row(way: Way, **options: object) -> PlanRow:
        spec = None if way.codec == OWN else way.codec
        memory = plan(stage=way.stage, codec=spec, **options)
        time = step_time(profile, training, way, cluster)
        return PlanRow(
            way, "param_codec" not in options, memory, time, sent_by(way, training, cluster)
        )

    rows = [row(Way(0, OWN)), *(row(Way(0, spec)) for spec in codecs)]
    for spec in codecs:
        rows.append(row(Way(1, spec, exact)))
        # Parameters have no residuals: what leaves most of them out is not for them.
        if not needs_feedback(spec) and error_of(spec) > error_of(exact):
            rows.append(row(Way(1, spec, spec), param_codec=spec))
    return rows


def sent_by(way: Way, training: Training, cluster: Cluster) -> float:
    world_size = cluster.world_size
    if way.codec == OWN:
        return 2 * training.numel * training.itemsize * (world_size - 1) / world_size
    if not way.stage:
        return cost.load_of("all_reduce", training.numel, way.codec, world_size).sent
    assert way.gather_codec is not None
    first = cost.load_of("reduce_scatter", training.numel, way.codec, world_size)
    second = cost.load_of("all_gather", training.numel, way.gather_codec, world_size)
    return first.sent + second.sent


def recommended(rows: Sequence[PlanRow], memory: int | None) -> tuple[PlanRow | None, str]:
    """The row to start with, and why: what fits, is fastest, and of equals loses least.

    Where that is equal too, DDP: it changes less.
    """
    fitting = [row for row in rows if memory is None or row.memory.peak <= memory]
    if not fitting:
        least = min(rows, key=lambda row: row.memory.peak)
        return None, (
            f"None fits into {show_bytes(memory or 0)}: {least.name} needs least, "
            f"{show_bytes(least.memory.peak)} without activations; shard the model itself, or use "
            "more memory."
        )
    usual = [row for row in fitting if not needs_feedback(row.way.codec)] or fitting
    fastest = min(usual, key=lambda row: row.time.step_s)
    equal = [row for row in usual if row.time.step_s <= TIE * fastest.time.step_s]
    best = min(equal, key=lambda row: (row.error, row.way.stage))
    return best, reason_for(best, fastest, rows, memory)


def reason_for(best: PlanRow, fastest: PlanRow, rows: Sequence[PlanRow], memory: int | None) -> str:
    within = f" of those that fit into {show_bytes(memory)}" if memory else ""
    if best is fastest:
        why = f"the fastest{within}"
    else:
        why = f"as fast as {fastest.name}, the fastest{within}, within 2%, and loses less"
    ratio = rows[0].time.step_s / best.time.step_s
    against = "" if best is rows[0] else f"; {ratio:.2f} times as fast as DDP alone"
    quicker = [row for row in rows if row.time.step_s * TIE < best.time.step_s]
    left_out = [row.name for row in quicker if needs_feedback(row.way.codec)]
    warning = f" ({left_out[0]} would be faster, and learns much worse.)" if left_out else ""
    return f"{best.name}: {why}{against}.{warning}"
