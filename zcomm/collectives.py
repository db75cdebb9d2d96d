"""Compressed collectives over any group: all_reduce, reduce_scatter, all_gather.

reduce_scatter   all-to-all of encoded runs, then one sum in rank order at each run's owner
all_gather       every rank encodes what it has and sends it to all; it decodes its own, too
all_reduce       the first, then the second with the owner's mean

Where several hosts have several ranks, the first sums inside each host and then between hosts; the
second takes the same way back. A Hierarchy in place of a codec says how.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm.base import arguments
from zcomm.codecs import Codec, codec
from zcomm.engine.engine import Engine, make_engine
from zcomm.engine.job import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Encoding, Job, JobData
from zcomm.engine.streams import Streams, streams_of
from zcomm.sharding.chunks import (
    Chunks,
    ChunkSize,
    Item,
    TwoHops,
    best_chunk_size,
    block_of,
    make_chunks,
)
from zcomm.sharding.feedback import Feedback
from zcomm.sharding.hierarchy import FOUND, Hierarchy, Hosts
from zcomm.sharding.owners import even_bounds, owner_bounds
from zcomm.torch_private.c10d import known_groups
from zcomm.transport import channels
from zcomm.transport.handshake import Caller, grouping, meet

_COLLECTIVES = {
    "all_reduce": ALL_REDUCE,
    "reduce_scatter": REDUCE_SCATTER,
    "all_gather": ALL_GATHER,
}


class _GroupEngine(NamedTuple):
    engine: Engine
    streams: Streams | None
    hosts: Hosts | None


_engines: dict[tuple[Any, torch.device, object], _GroupEngine] = {}


class Work:
    """A collective under way. wait() returns when the result is in place, or raises its error.

    On a CUDA device wait() makes the current stream wait, not the host.
    """

    def __init__(self, job: Job | None) -> None:
        self._job = job

    def wait(self) -> None:
        if self._job is not None:
            self._job.wait()
            if self._job.error is not None:
                raise self._job.error

    def is_completed(self) -> bool:
        return self._job is None or self._job.completed()


def all_reduce(
    tensor: Tensor,
    codec: str | Codec | Hierarchy = "lm4",
    group: Any = None,
    feedback: Feedback | None = None,
    async_op: bool = False,
    *,
    op: str = "mean",
    verify: bool = True,
) -> Work | None:
    """Overwrites `tensor` with the mean (op="sum": the sum) over the ranks of `group`.

    All ranks get the same bits. `feedback`, a `zcomm.Feedback()` kept for this tensor, adds what
    earlier calls left out; `sign` and `topk` need one. With `async_op` the tensor must be left
    alone until `wait()` of the returned work.
    """
    call = _Call("all_reduce", codec, group, feedback, op, verify)
    flat = call.flat(tensor, "tensor")
    bounds = _bounds(flat.numel(), block_of(call.codec), call.world_size)
    return call.run(flat, flat, bounds, async_op)


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    codec: str | Codec | Hierarchy = "lm4",
    group: Any = None,
    feedback: Feedback | None = None,
    async_op: bool = False,
    *,
    op: str = "mean",
    verify: bool = True,
) -> Work | None:
    """Overwrites `output` with rank r's part of the mean (or sum) of all ranks' `input`.

    `input` has as many elements as `output` for each rank, in rank order. It is summed in fp32, in
    rank order, after one encoding.
    """
    call = _Call("reduce_scatter", codec, group, feedback, op, verify)
    target, source = call.flat(output, "output"), call.flat(input, "input")
    call.expect_parts("input", source, "output", target)
    bounds = even_bounds(target.numel(), call.world_size)
    return call.run(source, target, bounds, async_op)


def all_gather(
    output: Tensor,
    input: Tensor,
    codec: str | Codec | Hierarchy = "lm4",
    group: Any = None,
    feedback: Feedback | None = None,
    async_op: bool = False,
    *,
    verify: bool = True,
) -> Work | None:
    """Overwrites `output` with the decoded `input` of every rank, in rank order.

    A rank's own part is decoded, too: all ranks get the same bits.
    """
    call = _Call("all_gather", codec, group, feedback, "sum", verify)
    target, source = call.flat(output, "output"), call.flat(input, "input")
    call.expect_parts("output", target, "input", source)
    bounds = even_bounds(source.numel(), call.world_size)
    return call.run(source, target, bounds, async_op)


class _Call:
    """The checked arguments of one call."""

    def __init__(
        self,
        name: str,
        spec: str | Codec | Hierarchy,
        group: Any,
        feedback: Feedback | None,
        op: str,
        verify: bool,
    ) -> None:
        self.name, self.group, self.verify = name, channels.group_of(group, name), bool(verify)
        self.hierarchy = spec if isinstance(spec, Hierarchy) else None
        self.codec = codec(_one_codec(name, spec.across) if isinstance(spec, Hierarchy) else spec)
        self.rank, self.world_size = channels.member_of(self.group, name)
        if op not in ("mean", "sum"):
            raise ValueError(f"{name}: expected op 'mean' or 'sum', got {op!r}")
        self.op = op
        if feedback is not None and not isinstance(feedback, Feedback):
            raise TypeError(
                f"{name}: expected feedback as a zcomm.Feedback() or None, got "
                f"{arguments.describe(feedback)}"
            )
        if feedback is None and self.codec.needs_feedback and self.world_size > 1:
            raise ValueError(
                f"{name}: expected feedback=zcomm.Feedback() with codec {self.codec.spec!r}, got "
                "None: it leaves out so much that it needs it; make one and keep it for this tensor"
            )
        self.feedback = feedback

    def flat(self, t: Tensor, what: str) -> Tensor:
        """`t` as a 1-D view; refuses what the engine cannot send."""
        what = f"{self.name}: {what}"
        arguments.expect_tensor(t, what)
        channels.expect_sendable(t, what)
        if self.world_size > 1:
            channels.expect_sender(t.device, self.group, what)
        arguments.address(t, what)
        return arguments.flat(t.detach(), what, "use a contiguous tensor").detach()

    def expect_parts(self, whole: str, all_: Tensor, part: str, one: Tensor) -> None:
        if all_.numel() != one.numel() * self.world_size:
            raise ValueError(
                f"{self.name}: expected {whole} of {one.numel() * self.world_size} elements "
                f"({part}'s {one.numel()} for each of {self.world_size} ranks), got {all_.numel()}"
            )
        if all_.dtype is not one.dtype:
            raise ValueError(
                f"{self.name}: expected {part} of {whole}'s dtype {all_.dtype}, got {one.dtype}"
            )
        arguments.expect_device(f"{self.name}: {part}", all_.device, one)
        if self.world_size > 1 and _overlap(all_, one):
            raise arguments.overlap(whole, part)

    def run(
        self, source: Tensor, target: Tensor, bounds: tuple[int, ...], async_op: bool
    ) -> Work | None:
        """Starts the collective and, without `async_op`, waits. One rank only copies."""
        if self.world_size > 1:
            work = Work(self._submit(JobData(source, target), bounds, awaited=not async_op))
        else:
            target.copy_(source)
            work = Work(None)
        if async_op:
            return work
        work.wait()
        return None

    def _submit(self, data: JobData, bounds: tuple[int, ...], awaited: bool) -> Job:
        source, numel = data.source, max(data.source.numel(), data.target.numel())
        engine, streams, hosts = self.engine(source.device)
        hierarchy = self.hierarchy or FOUND
        two_hops = TwoHops(hosts, hierarchy.local_codec) if hosts else None
        raw = source.dtype is torch.float64
        size = engine.chunk_size(best_chunk_size(self.world_size))
        chunks = _chunks(self.codec, bounds, self.rank, size, raw, two_hops)
        spec = repr(self.codec.spec) if self.hierarchy is None else f"{self.hierarchy}"
        call = f"{self.name}(codec={spec}, op={self.op!r}, verify={self.verify}) of "
        call += f"{numel} {source.dtype} elements"
        bound, mode = None, "none"
        if self.feedback is not None:
            record = streams.record_stream if streams else None
            bound = self.feedback.bind(call, chunks, self.rank, source.device, hosts, record)
            mode = f"{self.feedback.mode}, {self.feedback.dtype}"
        prescale = 1 / self.world_size if self.op == "mean" else 1.0
        encoding = Encoding(prescale, self.verify, bound)
        what, signature = f"{self.name} of {numel} elements", f"{call} (feedback: {mode})"
        job = Job(what, _COLLECTIVES[self.name], chunks, data, encoding, signature)
        job.awaited = awaited
        engine.submit(job)
        return job

    def engine(self, device: torch.device) -> _GroupEngine:
        """The engine of the group, made at its first use: all ranks of the group take part."""
        hops = _hops(self.hierarchy, device)
        key = self.group or dist.group.WORLD, device, hops
        if key not in _engines:
            _forget_old_groups()
            if hops != _hops(None, device):
                self._agree_on(hops, device)
            streams, timeout_s = streams_of(device), channels.group_timeout_s(self.group, device)
            caller = Caller(self.name, self.group, timeout_s)
            met = meet({"hierarchy": hops}, self.hierarchy, caller, self.rank, device)
            engine = make_engine(caller, met.name, streams, hosts=met.grouped)
            _engines[key] = _GroupEngine(engine, streams, met.grouped)
        return _engines[key]

    def _agree_on(self, hops: str, device: torch.device) -> None:
        """Checks that all ranks make this call, with the engine of a codec alone, which they all
        have or make. A rank that calls something else would never come to make the new engine."""
        flat = _Call(self.name, self.codec, self.group, self.feedback, self.op, self.verify)
        data = JobData(torch.empty(0, device=device), torch.empty(0, device=device))
        what, signature = f"{self.name} with hosts", f"{self.name} with {hops}"
        job = Job(what, REDUCE_SCATTER, Chunks(), data, signature=signature)
        flat.engine(device).engine.submit(job)
        Work(job).wait()


def _hops(hierarchy: Hierarchy | None, device: torch.device) -> str:
    """How ranks are grouped: calls with the same have one engine."""
    grouped = grouping(hierarchy, device)
    return "one hop" if grouped is None else f"hosts={grouped.hosts}"


@lru_cache(maxsize=64)
def _bounds(numel: int, block: int, world_size: int) -> tuple[int, ...]:
    return owner_bounds([(numel, block)], world_size)[0]


@lru_cache(maxsize=64)
def _chunks(
    codec: Codec,
    bounds: tuple[int, ...],
    rank: int,
    size: ChunkSize,
    raw: bool,
    two_hops: TwoHops | None,
) -> Chunks:
    item = Item("", codec, bounds[-1], 0, bounds)
    return make_chunks([item], rank, len(bounds) - 1, size, raw, two_hops)


def _one_codec(name: str, across: Any) -> Any:
    if isinstance(across, Mapping):
        raise TypeError(
            f"{name}: expected one codec across hosts, got patterns {list(across)}: a tensor has "
            "no name; use Hierarchy(across='lm4')"
        )
    return across


def _overlap(a: Tensor, b: Tensor) -> bool:
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + b.nbytes and second < first + a.nbytes


def _forget_old_groups() -> None:
    """Ends the engines of groups that torch has destroyed."""
    known = known_groups()
    for key in [key for key in _engines if key[0] not in known]:
        _engines.pop(key).engine.stop()
