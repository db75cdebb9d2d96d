"""What codec="auto" decides, and why.

On one host: none, through shared memory. Between hosts: the codec with which communication takes
the least time by the cost model, or a more exact one that takes at most 15% more. It is the one
place in zcomm where timing decides bits. Rank 0 decides for all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch

from zcomm.codecs import codec
from zcomm.engine.engine import Engine
from zcomm.engine.tuning.cost import OWN, Cluster, Estimate, Profile, estimate
from zcomm.engine.tuning.measure import CANDIDATES, Measured, Ranks, measure
from zcomm.report.units import show_bit_rate, show_rate, show_seconds
from zcomm.sharding.chunks import MOST_CHUNK_NUMEL, ChunkSize, TwoHops, best_chunk_size
from zcomm.transport.handshake import Caller, everyones

# How much longer communication may take with a more exact codec.
HYSTERESIS = 1.15
_ON_GPU = "lm4"  # nothing is measured there


@dataclass(frozen=True)
class Option:
    """A codec, or torch's own all-reduce (""): what the model expects of one step.

    `communication_s` is as if nothing overlapped. `step_s` is known once training has begun.
    `chunk_mb` is the size of chunks with which that is least; None: the usual one.
    """

    codec: str
    communication_s: float
    step_s: float | None = None
    chunk_mb: float | None = None


@dataclass(frozen=True)
class Choice:
    """A decision of codec="auto", and the step and the hosts for which it was made."""

    codec: str
    reason: str
    options: tuple[Option, ...] = ()
    step: int = 0
    measured_s: float = 0.0
    hosts: str = ""

    @property
    def chunk_mb(self) -> float | None:
        return next((one.chunk_mb for one in self.options if one.codec == self.codec), None)

    @property
    def speedup(self) -> float | None:
        """Expected, over plain DDP: of communication, or of the step once that is known."""
        known = {one.codec: one.step_s or one.communication_s for one in self.options}
        return known[OWN] / known[self.codec] if {OWN, self.codec} <= set(known) else None

    def __str__(self) -> str:
        parts = [f"codec='auto': {self.reason}"]
        if self.speedup is not None:
            of = "a step" if self.options[0].step_s else "communication"
            parts.append(f"expected {self.speedup:.1f}× plain DDP ({of})")
        return f"{'; '.join(parts)}; to pin it: codec={self.codec!r}"

    def table(self) -> list[list[str]]:
        """What was compared, for people: codec, communication, step."""
        return [
            [
                one.codec or "torch's own",
                show_seconds(one.communication_s),
                show_seconds(one.step_s) if one.step_s else "–",
                "chosen" if one.codec == self.codec else "",
            ]
            for one in self.options
        ]

    def with_codec(self, spec: str) -> Choice:
        return replace(self, codec=spec)

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> Choice:
        values = json.loads(text)
        return Choice(**{**values, "options": tuple(Option(**o) for o in values["options"])})


def _expect_may_choose() -> None:
    if torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "codec='auto': expected use_deterministic_algorithms(False), got True: times that are "
            "measured decide about bits; give a codec, such as codec='none' or codec='lm4'"
        )


def without_measuring(
    ranks: Ranks, device: torch.device, transport: str, numels: Sequence[int]
) -> Choice | None:
    """A choice that needs no measurement; None if one is needed."""
    if ranks.world_size == 1 or not any(numels):
        return Choice("none", "nothing is sent that it could choose for")
    if device.type != "cpu":
        return Choice(_ON_GPU, f"tensors on {device.type}, where nothing is measured yet")
    if ranks.host_count == 1:
        return Choice("none", f"all ranks are on one host ({transport})")
    return None


def best(options: Sequence[Option], cost_of: Mapping[str, float]) -> str:
    """The most exact codec that costs at most 15% more than the cheapest."""
    coded = [one.codec for one in options if one.codec != OWN]
    least = min(cost_of[spec] for spec in coded)
    close = [spec for spec in coded if cost_of[spec] <= HYSTERESIS * least]
    return min(close, key=lambda spec: codec(spec).error)


class Gradients(NamedTuple):
    """What a step sends: the collective of each bucket, their elements, and the bytes of one."""

    kind: str
    bucket_numels: Sequence[int]
    itemsize: int = 4


class Model:
    """What a step's communication takes, by codec."""

    def __init__(self, profile: Profile, cluster: Cluster, gradients: Gradients) -> None:
        self.profile, self.cluster, self.gradients = profile, cluster, gradients

    def estimates(self, spec: str, chunk_mb: float | None = None) -> list[Estimate]:
        """One for each bucket."""
        kind, numels, itemsize = self.gradients
        size = None if chunk_mb is None else ChunkSize.of_mb(chunk_mb)
        what = "all_reduce" if spec == OWN else kind
        return [
            estimate(self.profile, what, numel, spec, self.cluster, itemsize, size)
            for numel in numels
        ]

    def option(self, spec: str) -> Option:
        """With the best size of chunks: longer ones than usual where messages cost more than they
        overlap, as on fast links. Shorter ones were never faster."""
        sizes: list[float | None] = [None]
        # Between hosts with several ranks, slots are the limit.
        if spec != OWN and self.cluster.per_host == 1:
            usual = best_chunk_size(self.cluster.world_size)
            larger = {min(usual.numel * f, MOST_CHUNK_NUMEL) for f in (2, 4)} - {usual.numel}
            fit = (n for n in sorted(larger) if codec(spec).body_nbytes(n) <= usual.nbytes)
            sizes += [numel / 2**18 for numel in fit]
        expected = {mb: sum(one.s for one in self.estimates(spec, mb)) for mb in sizes}
        best_mb = min(sizes, key=lambda mb: expected[mb])
        return Option(spec, expected[best_mb], chunk_mb=best_mb)

    def options(self) -> tuple[Option, ...]:
        """Torch's own is among them where it does the same."""
        own = (OWN,) if self.gradients.kind == "all_reduce" else ()
        return tuple(map(self.option, (*own, *CANDIDATES)))


def choose(measured: Measured, model: Model, ranks: Ranks) -> Choice:
    options = model.options()
    chosen = best(options, {one.codec: one.communication_s for one in options})
    several = ranks.grouped is not None
    inside = f", {show_rate(measured.inside_bytes_per_s)} inside" if several else ""
    links = (
        f"{show_bit_rate(measured.cluster.bytes_per_s)} between {ranks.host_count} hosts{inside}"
    )
    reason = f"{links}: {chosen} between hosts{', exact inside' if several else ''}"
    return Choice(chosen, reason, options, measured_s=measured.s)


def decide(
    engine: Engine | None,
    ranks: Ranks,
    callers: Sequence[Caller],
    threads: int | None,
    two_hops: TwoHops | None,
    device: torch.device,
    gradients: Gradients,
) -> tuple[Choice, Model | None]:
    """All ranks call it and get the choice of rank 0; the model if it took a measurement.

    With two callers, those of agree(), all replicas get the same.
    """
    route = engine.transport.route if engine else ""
    simple, model = without_measuring(ranks, device, route, gradients.bucket_numels), None
    if simple is None:
        assert engine is not None
        _expect_may_choose()
        with engine.told():
            measured = measure(engine, ranks, threads, two_hops)
        model = Model(measured.profile, measured.cluster, gradients)
        simple = choose(measured, model, ranks)
    mine = replace(simple, hosts=ranks.table())
    theirs = everyones(mine.dumps() if ranks.rank == 0 else "", callers)[0]
    return Choice.loads(theirs), model
