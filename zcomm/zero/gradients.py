"""Sharded gradients across all ranks: their norm, and one gathered as a whole."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zcomm.ddp.compressor import DdpCompressor
from zcomm.torch_private import foreach
from zcomm.zero.shards import Shard


def agree(compressor: DdpCompressor, mine: float) -> list[float]:
    """Every rank's number, the same list on all ranks."""
    number = torch.tensor([mine], dtype=torch.float64, device=compressor.device)
    everyone: list[float] = compressor.exchange(number).tolist()
    compressor.raise_failure()
    return everyone


def global_norm(compressor: DdpCompressor, sums: Sequence[Tensor], norm_type: float) -> float:
    """The norm of all ranks' shards together; the same on all ranks."""
    mine = [t for t in sums if t.numel()]
    norms = [float(norm) for norm in foreach.norm(mine, norm_type)] if mine else []
    if math.isinf(norm_type):
        return _largest(agree(compressor, _largest(norms)))
    # The sum of powers, in fp64 and in rank order.
    total = math.fsum(agree(compressor, _power_sum(norms, norm_type)))
    return float(total ** (1 / norm_type))


def gather_run(compressor: DdpCompressor, shard: Shard, mine: Tensor, what: str) -> Tensor:
    """A new tensor with all ranks' runs, in memory order; `mine` is sharded like `shard`.

    fp64 stays fp64; anything else becomes fp32.
    """
    if compressor.engine is None:
        return mine.clone()
    source = mine if mine.dtype is torch.float64 else mine.float()
    whole = compressor.gather_runs(source, shard.item.bounds, f"{what} of {shard.name!r}")
    compressor.raise_failure()
    return whole


def _largest(values: Iterable[float]) -> float:
    """The largest value; NaN if there is one."""
    return max(values, key=lambda v: (math.isnan(v), v), default=0.0)


def _power_sum(norms: Sequence[float], norm_type: float) -> float:
    try:
        return math.fsum(norm**norm_type for norm in norms)
    except OverflowError:
        return math.inf
