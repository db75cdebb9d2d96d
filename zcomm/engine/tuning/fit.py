"""Fits the cost model to measured collectives, one kind of measurement after the other.

CPU times of collectives give the cost of a chunk and of a byte, their wall times latency and
overlap. Codecs, messages and the link are measured by themselves.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from zcomm.engine.tuning import cost
from zcomm.engine.tuning.codec_costs import CodecCost
from zcomm.engine.tuning.cost import OWN, Cluster, Profile


class Row(Protocol):
    """A measured collective; `codec` is OWN for the backend's own."""

    @property
    def kind(self) -> str: ...
    @property
    def codec(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def wire_nbytes(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def s(self) -> float: ...
    @property
    def cpu_s(self) -> float: ...


def profile_of(
    rows: Sequence[Row],
    costs: dict[str, CodecCost],
    message_s: float,
    about: dict[str, Any],
    cluster: Cluster,
) -> Profile:
    """A profile of the ranks that have measured these rows."""
    profile = Profile(
        about=about,
        cores=cluster.cores,
        latency_s=1e-3,
        chunk_s=2e-4,
        message_s=message_s,
        wire_s=1e-9,
        unhidden=0.3,
        bytes_per_s=cluster.bytes_per_s,
        efficiency=cost.USUAL_EFFICIENCY,
        own_step_s=2e-4,
        own_wire_s=1e-9,
        codecs=costs,
    )

    def s(candidate: Profile, row: Row) -> float:
        return predicted_s(candidate, row, cluster)

    def cpu_s(candidate: Profile, row: Row) -> float:
        return predicted_cpu_s(candidate, row, cluster)

    coded = [row for row in rows if row.codec != OWN]
    own = [row for row in rows if row.codec == OWN and row.kind == "all_reduce"]
    profile = closest(profile, ("chunk_s", "wire_s"), coded, cpu_s, lambda row: row.cpu_s)
    profile = closest(profile, ("latency_s", "unhidden"), coded, s, lambda row: row.s)
    largest = max(own, key=lambda row: row.nbytes)
    profile = replace(profile, own_wire_s=largest.cpu_s / largest.wire_nbytes)
    return closest(profile, ("own_step_s", "own_wire_s"), own, s, lambda row: row.s)


def predicted_s(profile: Profile, row: Row, cluster: Cluster) -> float:
    return cost.estimate(profile, row.kind, row.nbytes // 4, row.codec, cluster).s


def predicted_cpu_s(profile: Profile, row: Row, cluster: Cluster) -> float:
    numel = row.nbytes // 4
    load = cost.load_of(row.kind, numel, row.codec, cluster.world_size, cluster.per_host)
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
