"""The rows of `zcomm plan`: every strategy, and which one to start with."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from zcomm.cli.bench.collective_rows import OWN_ERROR
from zcomm.codecs import codec
from zcomm.engine.tuning import cost
from zcomm.engine.tuning.cost import OWN, Cluster, Profile, StepTime, Strategy, Workload, step_time
from zcomm.planning.memory import OPTIONS, MemoryPlan, plan
from zcomm.planning.optimizer_memory import optimizer_class
from zcomm.report.units import show_bytes
from zcomm.zero.elementwise import OptimizerSpec

# Steps within 2% count as equally fast: the model is not more precise than that.
TIE = 1.02
# The codec that gathers parameters of a dtype exactly.
EXACT = {"fp32": "none", "bf16": "bf16", "fp16": "fp16"}


class PlanArguments(NamedTuple):
    """The checked arguments."""

    dtype: str
    optimizer: str
    workload: Workload
    cluster: Cluster
    codecs: list[str]
    memory: int | None
    hosts: int
    net: str


class PlanRow(NamedTuple):
    strategy: Strategy
    exact: bool  # parameters are gathered without loss
    memory: MemoryPlan
    time: StepTime
    sent: float

    @property
    def name(self) -> str:
        if self.strategy.codec == OWN:
            return "DDP alone"
        if not self.strategy.stage:
            return f"DDP {self.strategy.codec}"
        gathered = "" if self.exact else f"+{self.strategy.gather_codec}"
        return f"ZeRO {self.strategy.codec}{gathered}"

    @property
    def error(self) -> tuple[float, float]:
        """Sort key: the error of gradients, then that of parameters."""
        gathered = 0.0 if self.exact else error_of(self.strategy.gather_codec or OWN)
        return error_of(self.strategy.codec), gathered


def error_of(spec: str) -> float:
    return OWN_ERROR if spec == OWN else codec(spec).error


def needs_feedback(spec: str) -> bool:
    return spec != OWN and codec(spec).needs_feedback


def why_no_zero(optimizer: str) -> str:
    """Why there are no rows for ZeRO with an optimizer, or ""."""
    kind = optimizer_class(optimizer)
    try:
        OptimizerSpec(kind, OPTIONS).state_kinds({})
    except ValueError:
        return (
            f"There are no rows for ZeRO: it gives each rank a part of a parameter, and "
            f"{kind.__name__} does not update element by element. Use it with zcomm.compress."
        )
    return ""


def rows_for(profile: Profile, wanted: PlanArguments, with_zero: bool) -> list[PlanRow]:
    """DDP alone; DDP with each codec; ZeRO with each, parameters exact or in the same codec."""
    workload, cluster, codecs = wanted.workload, wanted.cluster, wanted.codecs
    exact = EXACT[wanted.dtype]
    # Rank 0 is among those that own most.
    same: dict[str, Any] = {"optimizer": wanted.optimizer, "dtype": wanted.dtype, "rank": 0}
    same["one_host"] = wanted.hosts == 1

    def row(strategy: Strategy, **options: Any) -> PlanRow:
        spec = None if strategy.codec == OWN else strategy.codec
        options |= same
        memory = plan(workload.numel, cluster.world_size, strategy.stage, spec, **options)
        time = step_time(profile, workload, strategy, cluster)
        sent = sent_by(strategy, workload, cluster)
        return PlanRow(strategy, "param_codec" not in options, memory, time, sent)

    rows = [row(Strategy(0, OWN)), *(row(Strategy(0, spec)) for spec in codecs)]
    for spec in codecs if with_zero else ():
        rows.append(row(Strategy(1, spec, exact)))
        # The gather has no residuals, so it cannot use a codec that needs them.
        if not needs_feedback(spec) and error_of(spec) > error_of(exact):
            rows.append(row(Strategy(1, spec, spec), param_codec=spec))
    return rows


def sent_by(strategy: Strategy, workload: Workload, cluster: Cluster) -> float:
    world_size, numel = cluster.world_size, workload.numel
    if strategy.codec == OWN:
        return 2 * numel * workload.itemsize * (world_size - 1) / world_size
    ranks = world_size, cluster.per_host
    if not strategy.stage:
        return cost.load_of("all_reduce", numel, strategy.codec, *ranks).sent
    assert strategy.gather_codec is not None
    first = cost.load_of("reduce_scatter", numel, strategy.codec, *ranks)
    second = cost.load_of("all_gather", numel, strategy.gather_codec, *ranks)
    return first.sent + second.sent


def recommended(rows: Sequence[PlanRow], memory: int | None) -> tuple[PlanRow | None, str]:
    """The row to start with, and why: it fits, is fastest and, among equals, loses least.

    If that is equal too, DDP wins: it changes less.
    """
    fitting = [row for row in rows if memory is None or row.memory.peak <= memory]
    if not fitting:
        least = min(rows, key=lambda row: row.memory.peak)
        return None, (
            f"Nothing fits in {show_bytes(memory or 0)}: {least.name} needs the least, "
            f"{show_bytes(least.memory.peak)} without activations. Shard the model itself, or use "
            "more memory."
        )
    usual = [row for row in fitting if not needs_feedback(row.strategy.codec)] or fitting
    fastest = min(usual, key=lambda row: row.time.step_s)
    equal = [row for row in usual if row.time.step_s <= TIE * fastest.time.step_s]
    best = min(equal, key=lambda row: (row.error, row.strategy.stage))
    return best, reason_for(best, fastest, rows, memory)


def reason_for(best: PlanRow, fastest: PlanRow, rows: Sequence[PlanRow], memory: int | None) -> str:
    within = f" of those that fit in {show_bytes(memory)}" if memory else ""
    if best is fastest:
        why = f"the fastest{within}"
    else:
        why = f"within 2% of {fastest.name}, the fastest{within}, and loses less"
    ratio = rows[0].time.step_s / best.time.step_s
    against = "" if best is rows[0] else f", {ratio:.2f} times as fast as DDP alone"
    quicker = [row for row in rows if row.time.step_s * TIE < best.time.step_s]
    left_out = [row.name for row in quicker if needs_feedback(row.strategy.codec)]
    warning = f" ({left_out[0]} would be faster, but learns much worse.)" if left_out else ""
    return f"{best.name}: {why}{against}.{warning}"
