"""The cost model: how long a collective takes, and a training step.

    line      = bytes that leave the host / the host's bandwidth
    processor = codec + messages + chunks + bytes in and out, on the cores that ranks share
    time      = latency + longer of the two + (u + (1 - u) / chunks) · shorter of the two

`u` is the part of the shorter one that the chunk pipeline does not hide. A single chunk overlaps
nothing. Where hosts have several ranks, these first sum through shared memory, exactly: two hops.
docs/bandwidth.md derives the model and says how a profile is fitted.

In a step, DDP hands over one bucket after another during backward. With b buckets, the first is
ready when 1/b of backward is done and the last when backward ends:

    after = max(comm / b, comm - backward · (1 - 1/b))

If communication runs on the cores that compute, it slows backward down by the time it takes for all
buckets but the last. What the optimizer's step gathers after backward is fully exposed.
"""

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from zcomm import codecs
from zcomm.engine.tuning.codec_costs import CodecCost
from zcomm.report.usage import UsageError
from zcomm.sharding.chunks import ChunkSize, best_chunk_size, piece_limit
from zcomm.transport.shared_memory.ring import hops_chunk_size
from zcomm.wire.header import HEADER_NBYTES

# The collectives, and how often each encodes a value: on the way to its owner, and from there.
ENCODINGS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
KINDS = tuple(ENCODINGS)
# In place of a codec: the backend's own collective, uncompressed.
OWN = ""
INSIDE = "none"  # what ranks of a host exchange
FORMAT = "zcomm cost model 1"
# What `zcomm plan` uses; `python benchmarks/cost_model.py --write-default` writes it.
DEFAULT_PROFILE = Path(__file__).with_name("default_profile.json")
# The share of a link left after TCP and Ethernet overhead, if a profile has not measured it.
USUAL_EFFICIENCY = 0.95
_NO_NUMBERS = ("about", "codecs")
BUCKET_NBYTES = 25 << 20  # DDP's default


@dataclass(frozen=True)
class Profile:
    """What the model knows about a machine. Seconds are CPU time of one core unless noted."""

    about: dict[str, Any]  # where it was fitted
    cores: int
    latency_s: float  # of a collective, besides everything below
    chunk_s: float  # per chunk and hop
    message_s: float  # per message, sent and received
    wire_s: float  # per byte, sent and received
    unhidden: float  # u
    bytes_per_s: float  # of the link
    efficiency: float  # bytes_per_s relative to the nominal rate
    own_step_s: float  # of the backend's own all_reduce, per each of its 2(W - 1) steps
    own_wire_s: float
    codecs: dict[str, CodecCost]

    def cost(self, spec: str) -> CodecCost:
        if spec in self.codecs:
            return self.codecs[spec]
        same = [known for known in self.codecs if known.split(":")[0] == spec.split(":")[0]]
        if same:
            return self.codecs[same[0]]
        raise UsageError(
            f"expected codecs that the profile knows ({', '.join(self.codecs)}), got {spec!r}; "
            "fit one with `zcomm bench --fit`"
        )


class Cluster(NamedTuple):
    """How ranks share links and processors.

    Emulated hosts have a link each, but all their ranks share one machine's processor.
    """

    world_size: int
    ranks_per_link: float  # a mean, if hosts have different numbers of ranks
    ranks_per_machine: int
    cores: int  # of a machine
    bytes_per_s: float  # that a host's link sends
    inside: float = 0  # ranks that sum inside a host before they send; 0: those of a link

    @property
    def per_host(self) -> float:
        if self.ranks_per_link >= self.world_size:
            return 1
        return self.inside or self.ranks_per_link


class Estimate(NamedTuple):
    s: float
    line_s: float
    processor_s: float  # with the cores shared
    chunks: int


def estimate(
    profile: Profile,
    kind: str,
    numel: int,
    spec: str,
    cluster: Cluster,
    itemsize: int = 4,
    size: ChunkSize | None = None,
) -> Estimate:
    """One collective of `numel` elements; `itemsize` matters for the backend's own only. `size`:
    of chunks, if it is not the usual one."""
    if cluster.world_size < 2:
        return Estimate(0.0, 0.0, 0.0, 1)
    if spec == OWN:
        return _own_estimate(profile, numel, itemsize, cluster)
    load = load_of(kind, numel, spec, cluster.world_size, cluster.per_host, size)
    engine_s, others_s = cpu_parts(profile, load)
    share = cluster.ranks_per_machine / cluster.cores
    processor_s = max(engine_s, (engine_s + others_s) * share)
    line_s = line_nbytes(kind, numel, spec, cluster) / cluster.bytes_per_s
    s = profile.latency_s + overlapped(line_s, processor_s, profile.unhidden, load.chunks)
    return Estimate(s, line_s, processor_s, load.chunks)


def line_nbytes(kind: str, numel: int, spec: str, cluster: Cluster, itemsize: int = 4) -> float:
    """What the link of a host carries, in each direction."""
    if cluster.ranks_per_link >= cluster.world_size:
        return 0.0
    if spec == OWN:  # a ring: one rank of each host sends to the next host
        return 2 * numel * itemsize * (cluster.world_size - 1) / cluster.world_size
    sent = load_of(kind, numel, spec, cluster.world_size, cluster.per_host).sent
    if cluster.per_host > 1:
        return sent * cluster.per_host
    away = (cluster.world_size - cluster.ranks_per_link) / (cluster.world_size - 1)
    return sent * cluster.ranks_per_link * away


def overlapped(a: float, b: float, unhidden: float, chunks: int) -> float:
    return max(a, b) + (unhidden + (1 - unhidden) / chunks) * min(a, b)


def _own_estimate(profile: Profile, numel: int, itemsize: int, cluster: Cluster) -> Estimate:
    """The backend's all_reduce, a ring."""
    world_size = cluster.world_size
    sent = 2 * numel * itemsize * (world_size - 1) / world_size
    line_s = line_nbytes("all_reduce", numel, OWN, cluster, itemsize) / cluster.bytes_per_s
    processor_s = profile.own_wire_s * sent * max(1.0, cluster.ranks_per_machine / cluster.cores)
    steps_s = 2 * (world_size - 1) * profile.own_step_s
    # A ring takes many small steps, which hide nearly all of the shorter part.
    s = steps_s + overlapped(line_s, processor_s, profile.unhidden, 1 << 20)
    return Estimate(s, line_s, processor_s, 1)


class Load(NamedTuple):
    """What one rank does in a collective: between hosts, or ranks, and inside its host."""

    spec: str
    peers: float  # that exchange with each other
    encoded: float  # elements
    summed: float
    decoded: float
    sent: float  # bytes
    chunks: int
    hops: int
    per_host: float = 1  # ranks that sum inside a host first
    summed_inside: float = 0.0  # elements

    @property
    def encoded_inside(self) -> float:
        return self.summed_inside * self.per_host


def load_of(
    kind: str,
    numel: int,
    spec: str,
    world_size: int,
    per_host: float = 1,
    size: ChunkSize | None = None,
) -> Load:
    """With several ranks on a host, the elements that each encodes are the sums of its host."""
    codec = codecs.codec(spec)
    row = piece_limit(codec, world_size) * world_size
    per_element = codec.body_nbytes(row) / row
    size, widest = size or best_chunk_size(world_size), per_element
    if per_host > 1:
        size, widest = size.within(hops_chunk_size(world_size)), max(per_element, 4.0)
    chunk = max(min(size.numel, size.nbytes / widest), min(row, numel), 1)
    chunks = max(math.ceil(numel / chunk), 1)
    peers, shard, hops = world_size / per_host, numel / world_size, ENCODINGS[kind]
    reduce, gather = kind != "all_gather", kind != "reduce_scatter"
    frames = (peers - 1) * (shard * per_element + chunks * HEADER_NBYTES)
    return Load(
        spec=spec,
        peers=peers,
        encoded=numel / per_host * reduce + shard * gather,
        summed=shard * reduce,
        decoded=numel * gather,
        sent=hops * frames,
        chunks=chunks,
        hops=hops,
        per_host=per_host,
        summed_inside=numel / per_host * reduce if per_host > 1 else 0.0,
    )


def cpu_parts(profile: Profile, load: Load) -> tuple[float, float]:
    """CPU seconds of the engine's thread, and of the threads that move its bytes."""
    messages = load.chunks * load.hops * (load.peers - 1)
    cost, inside = profile.cost(load.spec), profile.cost(INSIDE)
    summed_s = load.summed * cost.summed_s(load.peers)
    summed_s += load.summed_inside * inside.summed_s(load.per_host)
    encoded_s = load.encoded * cost.encode_s + load.encoded_inside * inside.encode_s
    hops = load.hops * (2 if load.per_host > 1 else 1)
    engine_s = encoded_s + summed_s + load.decoded * cost.decode_s
    engine_s += load.chunks * hops * profile.chunk_s
    return engine_s, messages * profile.message_s + load.sent * profile.wire_s


class Workload(NamedTuple):
    """The model, and how long a step computes."""

    numel: int
    itemsize: int  # of gradients, which the backend's own collective sends unchanged
    step_s: float
    backward_share: float
    shares_cores: bool  # communication runs on the cores that compute


class Strategy(NamedTuple):
    """Stage 0 is DDP, stage 1 is ZeRO. The codec is OWN for DDP alone."""

    stage: int
    codec: str
    gather_codec: str | None = None  # for parameters, at stage 1


class StepTime(NamedTuple):
    compute_s: float
    hidden_s: float
    exposed_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s


def step_time(
    profile: Profile, workload: Workload, strategy: Strategy, cluster: Cluster
) -> StepTime:
    numel, itemsize = workload.numel, workload.itemsize
    kind = "reduce_scatter" if strategy.stage else "all_reduce"
    sent = estimate(profile, kind, numel, strategy.codec, cluster, itemsize)
    exposed_s = exposed_in_backward(workload, sent)
    total_s = sent.s
    if strategy.stage:
        assert strategy.gather_codec is not None
        gathered = estimate(profile, "all_gather", numel, strategy.gather_codec, cluster)
        exposed_s, total_s = exposed_s + gathered.s, total_s + gathered.s
    return StepTime(workload.step_s, max(total_s - exposed_s, 0.0), exposed_s)


def exposed_in_backward(workload: Workload, sent: Estimate) -> float:
    buckets = math.ceil(workload.numel * workload.itemsize / BUCKET_NBYTES)
    early = 1 - 1 / buckets
    slower_s = sent.processor_s * early if workload.shares_cores else 0.0
    backward_s = workload.step_s * workload.backward_share * early + slower_s
    return slower_s + max(sent.s / buckets, sent.s - backward_s)


def save(profile: Profile, path: Path) -> None:
    codecs = {spec: cost._asdict() for spec, cost in profile.codecs.items()}
    values = {"format": FORMAT, **asdict(profile), "codecs": codecs}
    path.write_text(json.dumps(values, indent=2) + "\n")


def _expect_sensible(profile: Profile) -> None:
    """Refuses a file that someone edited: no number may be missing, negative, 0 or NaN."""
    times = [s for one in profile.codecs.values() for s in one]
    numbers = [getattr(profile, f.name) for f in fields(profile) if f.name not in _NO_NUMBERS]
    if not all(0 < n < math.inf for n in numbers) or not all(0 <= s < math.inf for s in times):
        raise ValueError("a number that is not above 0")
    for name in ("cpu", "isa", "ranks", "link"):
        profile.about[name]


def load(path: Path = DEFAULT_PROFILE) -> Profile:
    try:
        values = json.loads(path.read_text())
        if values.pop("format", None) != FORMAT:
            raise ValueError("the format of another version")
        codecs = {spec: CodecCost(**cost) for spec, cost in values.pop("codecs").items()}
        profile = Profile(**values, codecs=codecs)
        _expect_sensible(profile)
        return profile
    except OSError as error:
        raise UsageError(f"expected a readable profile, got {path}: {error}") from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(
            f"expected a profile written by `zcomm bench --fit`, got {path} ({error})"
        ) from error
