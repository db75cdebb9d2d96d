"""The engine's buffers, before there is an engine: those of the largest chunks that will pass.

Chunks of a large model are made of a sample of its parameters: of each size and codec enough to
fill a chunk. So a plan for billions of parameters takes no longer than one for millions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from zcomm.chunks import Chunk, Item, make_chunks, piece_limit
from zcomm.engine import _SLOTS
from zcomm.parameter_gather import Gather
from zcomm.parameters import items_of
from zcomm.settings import PLAIN, Settings
from zcomm.shards import Shard

# topk's candidates in csrc/cpu/topk.cpp: room for all elements of a chunk, while it is encoded.
_TOPK_SCRATCH_NBYTES = 4
# A model of so many chunks, or fewer, is no sample.
_FEW_CHUNKS = 2 * _SLOTS

Named = dict[str, Tensor]
MakeShards = Callable[[Named, Mapping[str, Item]], list[Shard]]


class Buffers(NamedTuple):
    """Bytes that stay, and those while a chunk is encoded; elements of the longest chunk."""

    nbytes: int
    encode_nbytes: int
    longest_chunk: int


class Passing(NamedTuple):
    """A chunk, and the bytes that pass through the engine's shard and stage for it."""

    chunk: Chunk
    shard_nbytes: int
    stage_nbytes: int
    copies: int  # how many slots meet such a chunk: all of them, if it comes step after step


class Travel(NamedTuple):
    """How one rank's gradients and parameters travel."""

    settings: Settings
    param_settings: Settings | None
    rank: int
    world_size: int

    def gradients(self, named: Named, sharded: bool, every_step: bool = False) -> Iterator[Passing]:
        """Of a bucket with these parameters; the first one that DDP hands over has them all."""
        some = self._sample(named, self.settings)
        copies = _SLOTS if every_step or some is not named else 1
        items = items_of(some, self.settings, self.world_size)
        for dtype in _dtypes(some):
            size = torch.float64.itemsize if dtype is torch.float64 else torch.float32.itemsize
            staged = dtype in (torch.bfloat16, torch.float16)
            ours = [item for name, item in items.items() if some[name].dtype is dtype]
            for chunk in self._chunks(ours, dtype):
                shard = 0 if sharded else size * chunk.own.numel
                stage = size * chunk.numel if staged and not sharded else 0
                yield Passing(chunk, shard, stage, copies)

    def parameters(self, named: Named, shards_of: MakeShards) -> Iterator[Passing]:
        """The gather after a step with ZeRO."""
        some = self._sample(named, self.param_settings or Settings(PLAIN))
        shards = shards_of(some, items_of(some, self.settings, self.world_size))
        for dtype in _dtypes(some):
            ours = [shard for shard in shards if shard.flat.dtype is dtype]
            own = any(shard.has_master for shard in ours)
            gather = Gather(ours, self.rank, self.world_size, self.settings, self.param_settings)
            for chunk in gather.chunks:
                size = chunk.sum_dtype.itemsize
                stored = chunk.numel if own else chunk.numel - chunk.own.numel
                yield Passing(chunk, size * chunk.own.numel, size * stored, _SLOTS)

    def _chunks(self, items: Sequence[Item], dtype: torch.dtype) -> list[Chunk]:
        """Those of a warm-up as well."""
        raw = dtype is torch.float64
        offsets = accumulate((item.numel for item in items), initial=0)
        placed = [item._replace(offset=at) for item, at in zip(items, offsets)]
        plain = [item._replace(codec=PLAIN) for item in placed]
        ways = [plain] if raw else [placed, plain] if self.settings.start_step else [placed]
        size = self.settings.chunk_size(self.world_size)
        return [c for way in ways for c in make_chunks(way, self.rank, self.world_size, size, raw)]

    def _sample(self, named: Named, codecs: Settings) -> Named:
        """All parameters if they are few; else of each kind as many as fill a chunk."""
        some: Named = {}
        taken: Counter[object] = Counter()
        size = self.settings.chunk_size(self.world_size).numel
        if sum(p.numel() for p in named.values()) <= _FEW_CHUNKS * size:
            return named
        for name, p in named.items():
            codec = codecs.codec_of(name, p.numel())
            row = piece_limit(codec, self.world_size) * self.world_size
            most = max(size, row) + row
            kind = (codec, p.dtype, min(p.numel(), most))
            if taken[kind] < most:
                taken[kind] += max(p.numel(), 1)
                some[name] = p if p.numel() <= most else p.new_empty(most)
        return some


def buffers_of(gradients: Sequence[Passing], parameters: Sequence[Passing]) -> Buffers:
    """The engine's slots grow to the largest chunks, its shard and its stage to the largest one."""
    passing = [*gradients, *parameters]
    wires = [p.chunk.wire.wire_nbytes for p in passing for _ in range(p.copies)]
    rows = [p.chunk.rows_nbytes for p in passing for _ in range(p.copies)]
    slots = sum(nlargest(_SLOTS, wires)) + sum(nlargest(_SLOTS, rows))
    shard = max((p.shard_nbytes for p in passing), default=0)
    stage = max((p.stage_nbytes for p in passing), default=0)
    scratch = max((_topk_numel(p.chunk) for p in gradients), default=0) * _TOPK_SCRATCH_NBYTES
    longest = max((p.chunk.numel for p in gradients), default=0)
    return Buffers(slots + shard + stage, scratch, longest)


def _topk_numel(chunk: Chunk) -> int:
    return sum(p.stop - p.start for p in chunk.pieces if p.item.codec.name == "topk")


def _dtypes(named: Mapping[str, Tensor]) -> list[torch.dtype]:
    return list(dict.fromkeys(p.dtype for p in named.values()))
