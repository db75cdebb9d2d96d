"""The all-gather of parameters after an optimizer step.

Without a codec, owners send their runs exactly, in the parameter's dtype. With one, owners send the
difference between their fp32 master and the parameter, which is the same on all ranks:

    d  =  decode(encode(master - p))        p  <-  p + d        on every rank, the owner too

The master loses nothing: what the codec leaves out is part of the next difference. Replicas stay
identical, because all of them add the same d to the same p.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from itertools import accumulate, compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcomm.codecs import Codec
from zcomm.codecs.scattered import ScatteredLayout
from zcomm.ddp.compressor import DdpCompressor
from zcomm.engine.engine import Engine
from zcomm.engine.job import ALL_GATHER, Collective, Encoding, Job, JobData, Memory, Span
from zcomm.kernels import cpu
from zcomm.sharding.chunks import Chunk, Chunks, ChunkSize, Piece, make_chunks
from zcomm.sharding.settings import EXACT, Settings
from zcomm.torch_private import foreach
from zcomm.zero.shards import Shard


def difference_codec(settings: Settings | None, shard: Shard) -> Codec | None:
    """The codec of a parameter's differences; None: the parameter is gathered exactly."""
    if settings is None or shard.flat.dtype is torch.float64:
        return None
    return settings.lossy_codec_of(shard.name, shard.item.numel)


def gathered_codec(settings: Settings | None, shard: Shard) -> Codec:
    """The codec that sends a parameter: that of its differences, or of its exact dtype."""
    return difference_codec(settings, shard) or EXACT[shard.flat.dtype]


def needs_master(settings: Settings | None, shard: Shard) -> bool:
    """Whether the optimizer needs an fp32 copy: the parameter is half precision, or lags."""
    is_half = shard.flat.dtype in (torch.bfloat16, torch.float16)
    return is_half or difference_codec(settings, shard) is not None


def is_in_place(shards: Iterable[Shard]) -> bool:
    """Whether kernels read and write the parameters themselves: fp32 without masters."""
    return all(s.flat.dtype is torch.float32 and not s.has_master for s in shards)


class Gathers:
    """The gathers of an optimizer's parameters, one per dtype, created when first needed."""

    def __init__(self, compressor: DdpCompressor, param_settings: Settings | None) -> None:
        self._compressor, self._param_settings = compressor, param_settings
        self._of_steps: list[Gather] = []

    def clear(self) -> None:
        """Call this after parameters are added or move to other memory."""
        self._of_steps = []

    def run(self, shards: Collection[Shard], what: str, note: str, exact: bool) -> None:
        """Gathers all parameters, with their codecs or exactly; raises the engine's error."""
        engine = self._compressor.engine
        if engine is None:
            for shard in shards:
                if shard.has_master:
                    shard.run.copy_(shard.tensor)
            return
        if not exact and not self._of_steps:
            self._of_steps = self._make(engine, shards, self._param_settings)
        gathers = self._make(engine, shards, None) if exact else self._of_steps
        jobs = [gather.job(what, note) for gather in gathers]
        for job in jobs:
            job.awaited = True
            engine.submit(job)
        for job in jobs:
            job.wait()
        self._compressor.raise_failure()

    def _make(
        self, engine: Engine, shards: Collection[Shard], param_settings: Settings | None
    ) -> list[Gather]:
        by_dtype: dict[torch.dtype, list[Shard]] = {}
        for shard in shards:
            by_dtype.setdefault(shard.flat.dtype, []).append(shard)
            engine.record_stream(shard.flat)
            engine.record_stream(shard.tensor)
        size = engine.chunk_size(self._compressor.settings.chunk_size(self._compressor.world_size))
        return [Gather(same, self._compressor, param_settings, size) for same in by_dtype.values()]


class Gather:
    """The gather of all parameters of one dtype."""

    def __init__(
        self,
        shards: Sequence[Shard],
        compressor: DdpCompressor,
        param_settings: Settings | None,
        size: ChunkSize,
    ) -> None:
        settings, world_size = compressor.settings, compressor.world_size
        self.dtype = shards[0].flat.dtype
        coded = {s.name for s in shards if difference_codec(param_settings, s)}
        offsets = accumulate((shard.item.numel for shard in shards), initial=0)
        items = [
            shard.item._replace(codec=gathered_codec(param_settings, shard), offset=offset)
            for shard, offset in zip(shards, offsets)
        ]
        raw = self.dtype is torch.float64
        two_hops = compressor.buckets.two_hops
        self.chunks = make_chunks(items, compressor.rank, world_size, size, raw, two_hops)
        self._verify = settings.verify
        self._specs = ", ".join(sorted({item.codec.spec for item in items}))
        self._data = _ParameterData(self.chunks, {s.name: s for s in shards}, coded, self.dtype)

    def job(self, what: str, signature: str) -> Job:
        numel = sum(chunk.numel for chunk in self.chunks)
        signature = f"{what}: {numel} {self.dtype} parameters as {self._specs}{signature}"
        encoding = Encoding(verify=self._verify)
        name = f"parameters of {what}"
        return Job(name, ALL_GATHER, self.chunks, self._data, encoding, signature)


class _ParameterData(JobData):
    """Lets the engine read and write parameters chunk by chunk; creates its views once."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        shards: Mapping[str, Shard],
        coded: Container[str],
        dtype: torch.dtype,
    ) -> None:
        self.itemsize = dtype.itemsize
        in_place = is_in_place(shards.values())
        self._in_place = [_in_place(c, shards) for c in chunks] if in_place else None
        self._memory = _memory(chunks, self._in_place) if self._in_place else None
        self._loaded: list[tuple[list[Tensor], _ParameterRuns]] = []
        self._stored: list[_ParameterRuns] = []
        for chunk in () if in_place else chunks:
            runs = chunk.runs()
            own = [run for run in runs if run.owner == chunk.rank]
            updated = [_updated(run, shards[run.item.key]) for run in own]
            self._loaded.append((updated, _ParameterRuns(own, shards, coded)))
            self._stored.append(_ParameterRuns(runs, shards, coded))

    def tensors(self) -> tuple[Tensor, ...]:
        return ()  # Gathers records them

    def memory(self, chunks: Chunks, collective: Collective) -> Memory | None:
        return self._memory

    def owned(self, index: int, chunk: Chunk) -> ScatteredLayout | None:
        return None if self._in_place is None else self._in_place[index].own

    def destination(self, index: int, chunk: Chunk) -> ScatteredLayout | None:
        return None if self._in_place is None else self._in_place[index].others

    def load(self, index: int, chunk: Chunk, values: Tensor) -> None:
        updated, runs = self._loaded[index]
        parts = runs.split(values)
        if parts:
            foreach.copy_(parts, updated)
        if any(runs.coded):
            foreach.sub_(_where(parts, runs.coded), _where(runs.views, runs.coded))

    def store(self, index: int, chunk: Chunk, values: Tensor) -> None:
        runs = self._stored[index]
        parts = runs.split(values)
        if not all(runs.coded):
            foreach.copy_(_where(runs.views, runs.exact), _where(parts, runs.exact))
        if any(runs.coded):
            foreach.add_(_where(runs.views, runs.coded), _where(parts, runs.coded))


class _InPlace(NamedTuple):
    """A chunk in the parameters' own memory: this rank's part, and the other ranks' parts."""

    own: ScatteredLayout
    others: ScatteredLayout


class _ParameterRuns:
    """Views of runs of parameters, in the order of a chunk's packed values."""

    def __init__(
        self, runs: Sequence[Piece], shards: Mapping[str, Shard], coded: Container[str]
    ) -> None:
        self.views = [shards[run.item.key].flat[run.start : run.stop] for run in runs]
        self.coded = [run.item.key in coded for run in runs]  # sent as differences
        self.exact = [not coded for coded in self.coded]
        self._sizes = [run.stop - run.start for run in runs]

    def split(self, values: Tensor) -> list[Tensor]:
        return list(torch.split(values, self._sizes))


def _in_place(chunk: Chunk, shards: Mapping[str, Shard]) -> _InPlace:
    tensors = [shards[p.item.key].flat[p.start : p.stop] for p in chunk.pieces]
    segments = [(s.codec, s.peer) for s in chunk.wire.segments]
    last = chunk.wire.peers - 1
    split = next((i for i, (_, peer) in enumerate(segments) if peer == last), len(segments))
    own = [(codec, 0) for codec, _ in segments[split:]]
    return _InPlace(
        ScatteredLayout(own, tensors[split:], 1),
        ScatteredLayout(segments[:split], tensors[:split], last),
    )


class _OwnRuns(NamedTuple):
    """The parameters that this rank owns; encoded ones take their scattered layouts."""

    own_strip: Any
    own_parts: None = None


def _memory(chunks: Sequence[Chunk], in_place: Sequence[_InPlace]) -> Memory:
    """All of the parameters, by address."""
    owned: dict[int, list[tuple[int, int]]] = {r: [] for r in sorted(chunks[0].senders)}
    for chunk, parts in zip(chunks, in_place):
        for peer, r in enumerate(chunk.senders[:-1]):
            owned[r] += parts.others.runs(peer)
        owned[chunk.rank] += parts.own.runs()
    own = _OwnRuns(cpu.strips([owned[chunks[0].rank]]))
    everywhere = Span(0, torch.float32)
    return Memory(cpu.strips(list(owned.values())), everywhere, everywhere, own, everywhere)


def _updated(run: Piece, shard: Shard) -> Tensor:
    """The values that the optimizer updated: the owner's master, or the parameter itself."""
    return shard.tensor.detach()[run.start - shard.start : run.stop - shard.start]


def _where(tensors: Sequence[Tensor], chosen: Sequence[bool]) -> list[Tensor]:
    return list(compress(tensors, chosen))
