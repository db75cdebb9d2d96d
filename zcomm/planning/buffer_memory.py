"""DDP's buckets, and the engine's buffers, predicted from the largest chunks that it will see.

For a large model the chunks come from a sample of its parameters: for each size and codec, enough
to fill a chunk. So a plan for billions of parameters takes no longer than one for millions.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nlargest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcomm.base import arguments
from zcomm.engine.pipeline import SLOTS
from zcomm.planning.chunk_sizes import Owned, SizedChunk, owners_of, size_chunks
from zcomm.sharding.chunks import ChunkSize, piece_limit
from zcomm.sharding.settings import EXACT, PLAIN, Settings
from zcomm.torch_private.ddp import FIRST_BUCKET_BYTES, assign_buckets
from zcomm.transport.shared_memory.ring import chunk_size
from zcomm.zero.parameter_gather import gathered_codec, is_in_place
from zcomm.zero.shards import Shard

# topk's candidates in csrc/cpu/topk.cpp: room for all elements of a chunk while encoding it.
_TOPK_SCRATCH_NBYTES = 4
# A model with this many chunks or fewer is not sampled.
_FEW_CHUNKS = 2 * SLOTS
_BUCKET_CAP_MB = 25  # DDP's default

Named = dict[str, Tensor]
MakeShards = Callable[[Named, Mapping[str, Owned]], list[Shard]]


class BufferBytes(NamedTuple):
    """Lasting bytes, those of them that are there before the first chunk, bytes while encoding a
    chunk, and elements of the longest chunk."""

    nbytes: int
    shared_nbytes: int
    encode_nbytes: int
    longest_chunk: int


class ChunkUse(NamedTuple):
    """A chunk, and the bytes it needs in the engine's shard and stage buffers."""

    chunk: SizedChunk
    shard_nbytes: int
    stage_nbytes: int
    copies: int  # how many slots see such a chunk: all of them if it comes every step


class Traffic(NamedTuple):
    """The chunks that one rank's gradients and parameters make."""

    settings: Settings
    param_settings: Settings | None
    rank: int
    world_size: int
    one_host: bool

    @property
    def chunk_size(self) -> ChunkSize:
        size = self.settings.chunk_size(self.world_size)
        return size.within(chunk_size(self.world_size)) if self.one_host else size

    def gradients(self, named: Named, bucket: Named, sharded: bool) -> Iterator[ChunkUse]:
        """DDP's first bucket has all parameters; `bucket` comes in every step."""
        some = self._sample(named, self.settings)
        if some is named:
            yield from self._in_bucket(named, sharded, 1)
            yield from self._in_bucket(bucket, sharded, SLOTS)
        else:
            yield from self._in_bucket(some, sharded, SLOTS)

    def parameters(self, named: Named, shards_of: MakeShards) -> Iterator[ChunkUse]:
        """The gather after a step with ZeRO."""
        some = self._sample(named, self.param_settings or Settings(PLAIN))
        owned = self._owned(some)
        shards = shards_of(some, owned)
        for dtype in _dtypes(some):
            ours = [shard for shard in shards if shard.flat.dtype is dtype]
            sent = [
                owned[s.name]._replace(codec=gathered_codec(self.param_settings, s)) for s in ours
            ]
            size = 0 if is_in_place(ours) else _sum_itemsize(dtype)
            for chunk in self._chunks(sent, dtype):
                yield ChunkUse(chunk, size * chunk.own_numel, size * chunk.numel, SLOTS)

    def _in_bucket(self, named: Named, sharded: bool, copies: int) -> Iterator[ChunkUse]:
        owned = self._owned(named)
        for dtype in _dtypes(named):
            ours = [one for name, one in owned.items() if named[name].dtype is dtype]
            plain = [one._replace(codec=PLAIN) for one in ours]
            chunks = [] if dtype is torch.float64 else self._chunks(ours, dtype)
            if dtype is torch.float64 or self.settings.start_step:
                chunks += self._chunks(plain, dtype)
            staged = dtype in (torch.bfloat16, torch.float16)
            in_place = sharded or (self.one_host and self._is_plain(ours, dtype))
            size = 0 if in_place else _sum_itemsize(dtype)
            for chunk in chunks:
                stage = size * chunk.numel if staged else 0
                yield ChunkUse(chunk, size * chunk.own_numel, stage, copies)

    def _is_plain(self, owned: Sequence[Owned], dtype: torch.dtype) -> bool:
        """Whether zcomm.engine.plain takes a bucket: it has no buffers."""
        specs = {one.codec.spec for one in owned}
        fits = dtype is torch.float32 or specs == {EXACT[dtype].spec}
        plain = specs <= {"bf16", "fp16", "none"} and len(specs) == 1
        return plain and fits and not any(self.settings.mode(one.codec) for one in owned)

    def _owned(self, named: Named) -> dict[str, Owned]:
        return owners_of(named, self.settings, self.world_size, self.rank).parameters

    def _chunks(self, owned: Sequence[Owned], dtype: torch.dtype) -> list[SizedChunk]:
        raw = dtype is torch.float64
        return size_chunks(owned, self.world_size, self.chunk_size, raw=raw)

    def _sample(self, named: Named, codecs: Settings) -> Named:
        """All parameters if they are few; otherwise, of each kind, enough to fill a chunk."""
        some: Named = {}
        taken: Counter[object] = Counter()
        size = self.chunk_size.numel
        if sum(p.numel() for p in named.values()) <= _FEW_CHUNKS * size:
            return named
        for name, p in named.items():
            used = codecs.codec_of(name, p.numel())
            row = piece_limit(used, self.world_size) * self.world_size
            most = max(size, row)
            kind = (used, p.dtype, min(p.numel(), most))
            if taken[kind] < size:
                taken[kind] += max(p.numel(), 1)
                some[name] = p if p.numel() <= most else p.new_empty(most)
        return some


def buffers_of(
    gradients: Sequence[ChunkUse], parameters: Sequence[ChunkUse], shared_nbytes: int
) -> BufferBytes:
    """Slots grow to the largest chunks, unless they are in memory that the ranks of a host share;
    the shard and stage buffers grow to the largest one."""
    passing = [*gradients, *parameters]
    wires = [p.chunk.nbytes for p in passing for _ in range(p.copies)]
    rows = [
        p.chunk.rows_nbytes
        for ps, reduce in ((gradients, True), (parameters, False))
        for p in ps
        if p.chunk.needs_rows(reduce)
        for _ in range(p.copies)
    ]
    slots = shared_nbytes or sum(nlargest(SLOTS, wires)) + sum(nlargest(SLOTS, rows))
    shard = max((p.shard_nbytes for p in passing), default=0)
    stage = max((p.stage_nbytes for p in passing), default=0)
    scratch = max((p.chunk.topk_numel for p in gradients), default=0) * _TOPK_SCRATCH_NBYTES
    longest = max((p.chunk.numel for p in gradients), default=0)
    return BufferBytes(slots + shard + stage, shared_nbytes, scratch, longest)


def _sum_itemsize(dtype: torch.dtype) -> int:
    return 8 if dtype is torch.float64 else 4


def _dtypes(named: Mapping[str, Tensor]) -> list[torch.dtype]:
    return list(dict.fromkeys(p.dtype for p in named.values()))


class LocalGradients:
    """What autograd allocates besides DDP's buckets: all gradients or, with views, one at a time.

    `whole` is alive at the end of the first backward(), `kept` after it, and `in_bucket` until a
    later bucket is handed over. `bucket` has the parameters of the largest bucket.
    """

    def __init__(self, trained: Named, bucket_cap_mb: float | None, views: bool) -> None:
        self.bucket = _largest_bucket(trained, _bucket_limits(bucket_cap_mb))
        largest = max((p.nbytes for p in trained.values()), default=0)
        self.kept = 0 if views else nbytes_of(trained)
        self.whole = largest if views else self.kept
        self.in_bucket = largest if views else nbytes_of(self.bucket)


def _bucket_limits(bucket_cap_mb: Any) -> list[int]:
    """The size limits of DDP's first bucket and of the others."""
    if bucket_cap_mb is None:
        return [FIRST_BUCKET_BYTES, _BUCKET_CAP_MB * 2**20]
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)):
        got = arguments.describe(bucket_cap_mb)
        raise TypeError(f"bucket_cap_mb: expected a number, got {got}")
    if not 0 < bucket_cap_mb < float("inf"):
        raise ValueError(f"bucket_cap_mb: expected more than 0, got {bucket_cap_mb}")
    return [int(bucket_cap_mb * 2**20)]


def _largest_bucket(trained: Named, limits: list[int]) -> Named:
    """The largest of DDP's buckets from the second iteration on, in order of arrival."""
    names = list(trained)[::-1]
    if not names:
        return {}
    buckets, _ = assign_buckets([trained[n] for n in names], limits)
    named = [{names[i]: trained[names[i]] for i in bucket} for bucket in buckets]
    return max(named, key=nbytes_of)


def nbytes_of(named: Named) -> int:
    return sum(p.nbytes for p in named.values())
