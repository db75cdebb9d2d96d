"""What all ranks want to know of gradients that are sharded: their norm, or one as a whole."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zcomm.ddp.compressor import DdpCompressor
from zcomm.engine.job import ALL_GATHER, Job, JobData
from zcomm.sharding.chunks import make_chunks
from zcomm.sharding.settings import PLAIN
from zcomm.torch_private import foreach
from zcomm.zero.shards import Shard


def agree(compressor: DdpCompressor, mine: float) -> list[float]:
    """Every rank's number, the same list on all ranks."""
    everyone = compressor.exchange([mine])
    compressor.raise_failure()
    return everyone


def global_norm(compressor: DdpCompressor, sums: Sequence[Tensor], norm_type: float) -> float:
    """Of all ranks' shards together; the same on all ranks."""
    mine = [t for t in sums if t.numel()]
    norms = [float(norm) for norm in foreach.norm(mine, norm_type)] if mine else []
    if math.isinf(norm_type):
        return _largest(agree(compressor, _largest(norms)))
    # The sum of powers, in fp64 and in rank order.
    total = math.fsum(agree(compressor, _power_sum(norms, norm_type)))
    return float(total ** (1 / norm_type))


def gather_run(compressor: DdpCompressor, shard: Shard, mine: Tensor, what: str) -> Tensor:
    """The whole of something that is sharded as `shard` is, in the order of its memory.

    In fp32, or fp64 if it is in that; a new tensor.
    """
    if compressor.engine is None:
        return mine.clone()
    raw = mine.dtype is torch.float64
    source = mine if raw else mine.float()
    item = shard.item._replace(codec=PLAIN, offset=0)
    size = compressor.settings.chunk_size(compressor.world_size)
    chunks = make_chunks([item], compressor.rank, compressor.world_size, size, raw)
    whole = torch.empty(item.numel, dtype=source.dtype, device=source.device)
    what = f"{what} of {shard.name!r}"
    compressor.engine.run(Job(what, ALL_GATHER, chunks, JobData(source, whole), signature=what))
    compressor.raise_failure()
    return whole


def _largest(values: Iterable[float]) -> float:
    """NaN if there is one."""
    return max(values, key=lambda v: (math.isnan(v), v), default=0.0)


def _power_sum(norms: Sequence[float], norm_type: float) -> float:
    try:
        return math.fsum(norm**norm_type for norm in norms)
    except OverflowError:
        return math.inf
