"""Measures what the cost model needs, on the ranks that will train and with their own engine.

Nothing else uses the engine meanwhile. All ranks take the same steps: what decides about the next
one is exchanged first. At the end every rank has the same numbers.

    codecs       encode, decode and sums, on all ranks at once
    links        bytes between hosts, all pairs at once, in messages that grow from 64 KB
    all-reduces  torch's own and the engine's, with each codec, at sizes that grow from 64 KB
"""

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcomm.base.host import Host
from zcomm.codecs import codec
from zcomm.engine.engine import Engine
from zcomm.engine.job import ALL_GATHER, ALL_REDUCE, Encoding, Job, JobData
from zcomm.engine.tuning.codec_costs import CodecCost, cost_of
from zcomm.engine.tuning.cost import OWN, Cluster, Profile, line_nbytes
from zcomm.engine.tuning.fit import profile_of
from zcomm.sharding.chunks import Item, TwoHops, best_chunk_size, block_of, make_chunks
from zcomm.sharding.hierarchy import Hosts
from zcomm.sharding.owners import even_bounds, owner_bounds
from zcomm.transport.channels import Channel

# In the order of their errors.
CANDIDATES = ("none", "bf16", "int8", "lm4")
# How long links and all-reduces may take to measure, on the slowest rank.
_LINK_S, _ALL_REDUCES_S = 0.4, 1.0
_FIRST_NBYTES, _MOST_NBYTES = 64 << 10, 8 << 20
_LEAST_LINK_NBYTES, _IN_FLIGHT, _LINK_ROUNDS = 1 << 20, 4, 3
# A shaped link lets this much through at once after a pause: it is sent before anything is timed.
_BURST_NBYTES = 256 << 10
_GROWTH = 4
_CODEC_NUMEL, _CODEC_CHUNKS = 1 << 18, 8
_MESSAGES = 16
_ROUNDS = 3


# Whatever the user's defaults are. Their random numbers stay as they were.
_ON_CPU: Any = {"dtype": torch.float32, "device": "cpu"}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Ranks(NamedTuple):
    """Who measures: this rank, and on which host and machine each of them runs."""

    rank: int
    hosts: list[Host]
    grouped: Hosts | None  # if several hosts have several ranks on one

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    def here(self, rank: int) -> list[int]:
        """The ranks on a rank's host."""
        return [r for r, host in enumerate(self.hosts) if host == self.hosts[rank]]

    def table(self) -> str:
        """The number of each rank's host, in the order in which ranks name them."""
        return str([list(dict.fromkeys(self.hosts)).index(host) for host in self.hosts])

    @property
    def host_count(self) -> int:
        return len(set(self.hosts))

    def per_machine(self) -> int:
        """Containers and namespaces of one machine share its processors."""
        boots = [host.boot or host.name for host in self.hosts]
        return max(map(boots.count, boots))


@dataclass(frozen=True)
class Row:
    """An all-reduce: the median time of the slowest rank, and the CPU time of the mean rank."""

    codec: str
    nbytes: int
    ranks: int
    wire_nbytes: int
    s: float
    cpu_s: float
    kind: str = "all_reduce"


class Measured(NamedTuple):
    profile: Profile
    cluster: Cluster
    inside_bytes_per_s: float  # that a rank reads of its neighbors' memory
    rows: list[Row]
    s: float  # how long it took


def measure(
    engine: Engine, ranks: Ranks, threads: int | None, two_hops: TwoHops | None
) -> Measured:
    started = perf_counter()
    together = _Together(engine, ranks, two_hops)
    costs = _codec_costs(together, threads)
    message_s = _message_s(together)
    bytes_per_s = _bytes_per_s(together)
    rows = _rows(together, bytes_per_s)
    cores = int(together.most(float(len(os.sched_getaffinity(0))))[0])
    per_link = ranks.world_size / ranks.host_count
    inside = 1 if ranks.grouped is None else ranks.world_size / len(ranks.grouped)
    cluster = Cluster(ranks.world_size, per_link, ranks.per_machine(), cores, bytes_per_s, inside)
    cluster = cluster._replace(bytes_per_s=max(bytes_per_s, *_line_rates(rows, cluster)))
    profile = profile_of(rows, costs, message_s, {}, cluster)
    inside = 4 / (costs["none"].sum_wire_s or costs["none"].decode_s)
    return Measured(profile, cluster, inside, rows, perf_counter() - started)


class _Together:
    """Steps that all ranks take at once."""

    def __init__(self, engine: Engine, ranks: Ranks, two_hops: TwoHops | None) -> None:
        self.engine, self.ranks, self.two_hops = engine, ranks, two_hops

    def everyones(self, *mine: float) -> Tensor:
        """A row of numbers from each rank; no rank has it before all have come."""
        world_size = self.ranks.world_size
        values = torch.tensor(mine, dtype=torch.float64, device="cpu")
        bounds = even_bounds(len(mine), world_size)
        size = self.engine.chunk_size(best_chunk_size(world_size))
        item = Item("", codec("none"), bounds[-1], 0, bounds)
        chunks = make_chunks([item], self.ranks.rank, world_size, size, raw=True)
        whole = torch.zeros(bounds[-1], dtype=torch.float64, device="cpu")
        what = f"measurement, {len(mine)} numbers"
        self._run(Job(what, ALL_GATHER, chunks, JobData(values, whole), signature=what))
        return whole.view(world_size, -1)

    def most(self, *mine: float) -> list[float]:
        return [float(x) for x in self.everyones(*mine).amax(0)]

    def all_reduce(self, x: Tensor, spec: str) -> Callable[[], object]:
        """What it takes, as a call."""
        if spec == OWN:
            channel = self.engine.transport.flat.reduce
            return lambda: self._wait(lambda: [channel.all_reduce(x)], "torch's all_reduce")
        ranks, used = self.ranks, codec(spec)
        bounds = owner_bounds([(x.numel(), block_of(used))], ranks.world_size)[0]
        item = Item("", used, x.numel(), 0, bounds)
        size = self.engine.chunk_size(best_chunk_size(ranks.world_size))
        chunks = make_chunks([item], ranks.rank, ranks.world_size, size, two_hops=self.two_hops)
        what = f"measurement, all_reduce of {x.numel()} elements as {spec}"
        encoding = Encoding(1 / ranks.world_size)
        return lambda: self._run(
            Job(what, ALL_REDUCE, chunks, JobData(x, x), encoding, signature=what)
        )

    def send(self, nbytes: int, count: int = 1) -> None:
        """Messages of as many bytes from each rank to each rank on another host, as the engine
        sends them: one large one would be slower."""
        ranks = self.ranks
        away = ranks.world_size - len(ranks.here(ranks.rank))
        splits = [0 if host == ranks.hosts[ranks.rank] else nbytes for host in ranks.hosts]
        mine, *theirs = (
            torch.zeros(nbytes * away, dtype=torch.uint8, device="cpu") for _ in range(1 + count)
        )
        channel: Channel = self.engine.transport.flat.gather
        self._wait(
            lambda: [channel.all_to_all(t, mine, splits, splits) for t in theirs], "its links"
        )

    def _run(self, job: Job) -> None:
        self.engine.run(job)
        if job.error is not None:
            raise job.error

    def _wait(self, start: Callable[[], list[torch.distributed.Work]], what: str) -> None:
        started = perf_counter()
        try:
            for work in start():
                work.wait()
        except RuntimeError as error:
            waited_s = perf_counter() - started
            where = f"the measurement of {what}"
            raise self.engine.transport.notes.failure(where, error, waited_s) from error


def _codec_costs(together: _Together, threads: int | None) -> dict[str, CodecCost]:
    """The slowest rank's."""
    source = torch.randn(_CODEC_CHUNKS * _CODEC_NUMEL, generator=_generator(), **_ON_CPU)
    target = torch.zeros_like(source)
    together.most(0.0)  # so that all measure at once
    mine = [cost_of(spec, source, target, _CODEC_NUMEL, threads) for spec in CANDIDATES]
    most = together.most(*(s for one in mine for s in one))
    width = len(CodecCost._fields)
    return {spec: CodecCost(*most[width * i :][:width]) for i, spec in enumerate(CANDIDATES)}


def _message_s(together: _Together) -> float:
    """CPU time of a message of hardly any bytes, sent and received."""
    together.send(1)
    cpu = process_time()
    for _ in range(_MESSAGES):
        together.send(1)
    mine = (process_time() - cpu) / _MESSAGES
    return max(together.most(mine)[0] / (together.ranks.world_size - 1), 1e-7)


def _bytes_per_s(together: _Together) -> float:
    """What leaves the busiest host, with all pairs of hosts at work."""
    ranks = together.ranks
    together_here = (len(ranks.here(r)) for r in range(ranks.world_size))
    pairs = max(here * (ranks.world_size - here) for here in together_here)
    nbytes, left_s = _FIRST_NBYTES, _LINK_S
    while True:
        count = min(_IN_FLIGHT, -(-nbytes // _FIRST_NBYTES))
        s = _sent_in(together, nbytes // count // pairs, count)
        left_s -= s
        larger = nbytes * _GROWTH
        fits = _LINK_ROUNDS * s * _GROWTH < left_s and larger <= _MOST_NBYTES
        if nbytes >= _LEAST_LINK_NBYTES and not fits:
            break
        nbytes = larger
    # Other load only makes it slower.
    again = [_sent_in(together, nbytes // count // pairs, count) for _ in range(_LINK_ROUNDS - 1)]
    return nbytes / min(s, *again)


def _sent_in(together: _Together, nbytes: int, count: int) -> float:
    """Seconds that the slowest rank takes for messages, once the link's burst is used up."""
    together.send(max(_BURST_NBYTES // together.ranks.world_size, 1))
    started = perf_counter()
    together.send(max(nbytes, 1), count)
    return together.most(perf_counter() - started)[0]


def _rows(together: _Together, bytes_per_s: float) -> list[Row]:
    """All-reduces of growing sizes, as long as they are expected to leave time for the rest."""
    rows: list[Row] = []
    left_s, nbytes, before_s = _ALL_REDUCES_S, _FIRST_NBYTES, 0.0
    while True:
        added, spent_s = _rows_of(together, nbytes)
        rows += added
        left_s -= spent_s
        larger = nbytes * _GROWTH
        line_s = 2 * larger / bytes_per_s * _ROUNDS * sum(map(_bits, (OWN, *CANDIDATES))) / 32
        expected_s = spent_s + _GROWTH * max(spent_s - before_s, 0.0) if before_s else spent_s
        if larger > _MOST_NBYTES or max(expected_s, line_s) > left_s:
            return rows
        nbytes, before_s = larger, spent_s


def _line_rates(rows: list[Row], cluster: Cluster) -> Iterator[float]:
    """What all-reduces sent over a link, per second: it carries at least that, after a burst."""
    for row in rows:
        sent = line_nbytes(row.kind, row.nbytes // 4, row.codec, cluster)
        yield max(sent - _BURST_NBYTES, 0.0) / row.s


def _bits(spec: str) -> float:
    return 32 if spec == OWN else codec(spec).body_nbytes(1 << 16) * 8 / (1 << 16)


def _rows_of(together: _Together, nbytes: int) -> tuple[list[Row], float]:
    """One row for each codec, and how long it took."""
    began = perf_counter()
    ranks = together.ranks
    x, generator = torch.zeros(nbytes // 4, **_ON_CPU), _generator()
    calls = {spec: together.all_reduce(x, spec) for spec in (OWN, *CANDIDATES)}
    taken: dict[str, list[tuple[float, float]]] = {spec: [] for spec in calls}
    for _ in range(_ROUNDS):
        for spec, call in calls.items():
            x.normal_(generator=generator)
            together.send(max(_BURST_NBYTES // ranks.world_size, 1))
            together.most(0.0)
            cpu, started = process_time(), perf_counter()
            call()
            taken[spec].append((perf_counter() - started, process_time() - cpu))
    medians = [statistics.median(values) for one in taken.values() for values in zip(*one)]
    everyone = together.everyones(perf_counter() - began, *medians)
    spent_s = float(everyone[:, 0].max())
    rows = []
    for i, spec in enumerate(calls):
        s, cpu_s = everyone[:, 1 + 2 * i].max(), everyone[:, 2 + 2 * i].mean()
        sent = 2 * nbytes * (ranks.world_size - 1) / ranks.world_size
        rows.append(Row(spec, nbytes, ranks.world_size, round(sent), float(s), float(cpu_s)))
    return rows, spent_s
