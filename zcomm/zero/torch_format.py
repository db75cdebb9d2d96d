"""The state of a ZeroOptimizer for torch.distributed.checkpoint.state_dict.

get_optimizer_state_dict, set_optimizer_state_dict and their siblings take any optimizer apart: they
look at `state`, call state_dict() and load_state_dict(), and name parameters by themselves. What
they get here is what an ordinary optimizer gives them, with this rank's shards in place of tensors,
or whole tensors if they ask for those. So either kind of optimizer loads what the other has saved.
"""

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from zcomm.sharding.shaped_shards import ShapedShard
from zcomm.torch_private.state_dicts import Asked
from zcomm.transport.handshake import agree
from zcomm.zero.consolidate import consolidate, numbered_groups
from zcomm.zero.elementwise import ELEMENT
from zcomm.zero.gradients import gather_run
from zcomm.zero.groups import ShardedGroups
from zcomm.zero.shards import Shard


class ShardStates(MutableMapping[Tensor, Any]):
    """`opt.state`: what this rank holds for each parameter, and the initial state of the others.

    It is never empty: torch would make up a state with a step of its own.
    """

    def __init__(self, groups: ShardedGroups) -> None:
        self._groups = groups

    def _shard(self, p: Tensor) -> Shard:
        shard = self._groups.shard_of(p)
        if shard is None:
            raise KeyError(p)
        return shard

    def __getitem__(self, p: Tensor) -> Any:
        return self._groups.state_of(self._shard(p))

    def __setitem__(self, p: Tensor, state: Any) -> None:
        self._groups.inner.state[self._shard(p).tensor] = state

    def __delitem__(self, p: Tensor) -> None:
        del self._groups.inner.state[self._shard(p).tensor]

    def __iter__(self) -> Iterator[Tensor]:
        inner = self._groups.inner
        return (s.parameter for s in self._groups.shards.values() if inner.state.get(s.tensor))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return True


def state_dict(groups: ShardedGroups, asked: Asked) -> dict[str, Any]:
    """Collective if whole tensors are asked for."""
    groups.compressor.synchronize()
    if asked.on_rank_0:
        return consolidate(groups, 0, initial=True) or {"state": {}, "param_groups": []}
    if asked.full:
        compressor = groups.compressor
        agree(
            {}, [compressor.caller("get_optimizer_state_dict", compressor.group)], compressor.rank
        )
    state = {
        index: _saved(groups, shard, kinds, asked.full)
        for index, shard, kinds in groups.numbered()
        if kinds
    }
    return {"state": state, "param_groups": numbered_groups(groups)}


def _saved(
    groups: ShardedGroups, shard: Shard, kinds: Mapping[str, Any], full: bool
) -> dict[str, Any]:
    saved = {}
    for key, value in groups.state_of(shard).items():
        if kinds.get(key) is not ELEMENT:
            saved[key] = copy.deepcopy(value) if full else value
        else:
            saved[key] = _whole(groups, shard, value) if full else _part(shard, value)
    return saved


def _part(shard: Shard, mine: Tensor) -> Tensor:
    p = shard.parameter
    if not p.numel():  # torch's checkpoints cannot have a tensor without elements in parts
        return torch.empty_like(p, dtype=mine.dtype)
    return ShapedShard.cut(mine, shard.start, p.shape, p.stride())


def _whole(groups: ShardedGroups, shard: Shard, mine: Tensor) -> Tensor:
    p = shard.parameter
    whole = gather_run(groups.compressor, shard, mine, "get_optimizer_state_dict")
    return whole.to(mine.dtype).as_strided(p.shape, p.stride())
