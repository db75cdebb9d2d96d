"""The state of a ShardedOptimizer in the ordinary torch format, and back.

Parameter by parameter, from the owners to one rank: nobody but that rank holds more than its
shards, and one tensor more at a time.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm.transport.channels import gather_bytes
from zcomm.zero.elementwise import ELEMENT
from zcomm.zero.shards import Shard
from zcomm.zero.state import Sharded


def is_ordinary_state(state: object) -> bool:
    return isinstance(state, Mapping) and set(state) == {"state", "param_groups"}


def consolidate(opt: Sharded, to: int) -> dict[str, Any] | None:
    """Collective; the state on rank `to`, None on the others."""
    compressor = opt.compressor
    compressor.raise_failure()
    if not 0 <= to < compressor.world_size:
        raise ValueError(
            f"rank {compressor.rank}: consolidated_state_dict: expected a rank < "
            f"{compressor.world_size}, got {to}"
        )
    state: dict[int, dict[str, Any]] = {}
    for index, shard, kinds in _numbered(opt):
        held = opt.inner.state.get(shard.tensor)
        if held:
            state[index] = {
                key: _gathered(opt, shard, value, to)
                if kinds.get(key) is ELEMENT
                else copy.deepcopy(value)
                for key, value in held.items()
            }
    if compressor.rank != to:
        return None
    return {"state": state, "param_groups": _groups(opt)}


def load_ordinary(opt: Sharded, state: Mapping[str, Any] | None) -> None:
    """Collective. Every rank takes its runs, from its own copy of the state or from a rank's."""
    group = opt.compressor.group
    everyones = gather_bytes(b"" if state is None else pickle.dumps(_outline(opt, state)), group)
    source = next((rank for rank, outline in enumerate(everyones) if outline), None)
    if source is None:
        raise ValueError(
            f"rank {opt.compressor.rank}: load_state_dict: expected a state on at least one rank, "
            "got None on all of them"
        )
    outline = pickle.loads(everyones[source])
    _expect_fit(opt, outline)
    runs = _own_runs if all(everyones) else _sent_runs
    for index, shard, kinds in _numbered(opt):
        opt.inner.state.pop(shard.tensor, None)
        values = outline["state"].get(index)
        if values:
            mine = state["state"][index] if state is not None else {}
            opt.inner.state[shard.tensor] = {
                key: runs(opt, shard, mine.get(key), source) if kinds[key] is ELEMENT else value
                for key, value in values.items()
            }
    for options, saved in zip(opt.param_groups, outline["param_groups"]):
        options.update({key: value for key, value in saved.items() if key != "params"})


def _outline(opt: Sharded, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with shapes in place of what has a value for each element."""
    kinds = {index: found for index, _, found in _numbered(opt)}
    outlined = {
        index: {
            key: v.shape if kinds.get(index, {}).get(key) is ELEMENT and hasattr(v, "shape") else v
            for key, v in held.items()
        }
        for index, held in state["state"].items()
    }
    return {"param_groups": state["param_groups"], "state": outlined}


def _expect_fit(opt: Sharded, outline: Mapping[str, Any]) -> None:
    """Refuses another model's state, on every rank, before anything is changed."""
    what = f"rank {opt.compressor.rank}: load_state_dict: expected"
    mine, saved = ([len(g["params"]) for g in gs] for gs in (_groups(opt), outline["param_groups"]))
    if mine != saved:
        raise ValueError(f"{what} groups of {mine} parameters, got groups of {saved}")
    for index, shard, kinds in _numbered(opt):
        values = outline["state"].get(index) or {}
        if values and set(values) != set(kinds):
            raise ValueError(f"{what} state {sorted(kinds)} of an optimizer, got {sorted(values)}")
        for key, shape in values.items():
            if kinds[key] is ELEMENT and shape != shard.parameter.shape:
                expected = tuple(shard.parameter.shape)
                raise ValueError(f"{what} {key} of {shard.name!r} of shape {expected}, got {shape}")


def _own_runs(opt: Sharded, shard: Shard, whole: Tensor | None, source: int) -> Tensor:
    assert whole is not None
    return _in_memory_order(shard, whole)[shard.start : shard.stop].clone()


def _sent_runs(opt: Sharded, shard: Shard, whole: Tensor | None, source: int) -> Tensor:
    compressor, bounds = opt.compressor, shard.item.bounds
    mine = torch.empty_like(shard.tensor)
    if compressor.rank != source:
        if mine.numel():
            dist.recv(mine, group=compressor.group, group_src=source)
        return mine
    assert whole is not None
    ordered = _in_memory_order(shard, whole)
    for rank in range(compressor.world_size):
        run = ordered[bounds[rank] : bounds[rank + 1]]
        if rank == source:
            mine.copy_(run)
        elif run.numel():
            dist.send(run, group=compressor.group, group_dst=rank)
    return mine


def _in_memory_order(shard: Shard, whole: Tensor) -> Tensor:
    """A value for each element, in the order of the parameter's memory."""
    p = shard.parameter
    like = shard.tensor
    ordered = torch.empty_strided(p.shape, p.stride(), dtype=like.dtype, device=like.device)
    ordered.copy_(whole)
    return ordered.as_strided((p.numel(),), (1,))


def _numbered(opt: Sharded) -> Iterator[tuple[int, Shard, Mapping[str, Any]]]:
    """The shards with the numbers that torch's state dicts give to their parameters."""
    by_id = {id(shard.parameter): shard for shard in opt.shards.values()}
    index = 0
    for group, kinds in zip(opt.param_groups, opt.state_kinds):
        for p in group["params"]:
            if id(p) in by_id:
                yield index, by_id[id(p)], kinds
            index += 1


def _groups(opt: Sharded) -> list[dict[str, Any]]:
    groups, index = [], 0
    for group in opt.param_groups:
        count = len(group["params"])
        groups.append({**opt.options(group), "params": list(range(index, index + count))})
        index += count
    return groups


def _gathered(opt: Sharded, shard: Shard, mine: Tensor, to: int) -> Tensor | None:
    """The whole of something that is sharded as `shard` is, in the parameter's shape."""
    compressor = opt.compressor
    bounds, group = shard.item.bounds, compressor.group
    if compressor.rank != to:
        if mine.numel():
            dist.send(mine.contiguous(), group=group, group_dst=to)
        return None
    whole = torch.empty(shard.item.numel, dtype=mine.dtype, device=mine.device)
    whole[shard.start : shard.stop] = mine
    for rank in range(compressor.world_size):
        part = whole[bounds[rank] : bounds[rank + 1]]
        if rank != to and part.numel():
            dist.recv(part, group=group, group_src=rank)
    return whole.as_strided(shard.parameter.shape, shard.parameter.stride())
