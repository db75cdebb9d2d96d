"""The state of a ZeroOptimizer in the ordinary torch format, and back.

Owners send to one rank, parameter by parameter. The other ranks never hold more than their shards
and one tensor.
"""

import copy
import pickle
from collections.abc import Mapping
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm.transport.handshake import agree
from zcomm.zero.elementwise import ELEMENT, options_of
from zcomm.zero.groups import ShardedGroups
from zcomm.zero.shards import Shard


def is_ordinary_state(state: object) -> bool:
    return isinstance(state, Mapping) and set(state) == {"state", "param_groups"}


def consolidate(groups: ShardedGroups, to: int) -> dict[str, Any] | None:
    """Collective: returns the state on rank `to`, None on the others."""
    compressor = groups.compressor
    compressor.raise_failure()
    if not 0 <= to < compressor.world_size:
        raise ValueError(
            f"rank {compressor.rank}: consolidated_state_dict: expected a rank < "
            f"{compressor.world_size}, got {to}"
        )
    caller = compressor.caller("consolidated_state_dict", compressor.group)
    agree({"to": str(to)}, [caller], compressor.rank)
    state: dict[int, dict[str, Any]] = {}
    for index, shard, kinds in groups.numbered():
        held = groups.inner.state.get(shard.tensor)
        if held:
            state[index] = {
                key: _gathered(groups, shard, value, to)
                if kinds.get(key) is ELEMENT
                else copy.deepcopy(value)
                for key, value in held.items()
            }
    if compressor.rank != to:
        return None
    numbers = count()  # in place of parameters, as torch saves them
    param_groups = [
        {**options_of(group), "params": [next(numbers) for _ in group["params"]]}
        for group in groups.groups
    ]
    return {"state": state, "param_groups": param_groups}


def load_ordinary(groups: ShardedGroups, state: Mapping[str, Any] | None) -> None:
    """Collective: each rank takes its runs from its own copy of the state, or is sent them."""
    compressor = groups.compressor
    caller = compressor.caller("load_state_dict", compressor.group)
    have = caller.gather_json(state is not None)
    source = have.index(True) if True in have else None
    if source is None:
        raise ValueError(
            f"rank {groups.compressor.rank}: load_state_dict: expected a state on at least one "
            "rank, got None on all of them"
        )
    mine = pickle.dumps(_outline(groups, state)) if state and source == compressor.rank else b""
    outline = pickle.loads(caller.gather(mine)[source])
    _expect_fit(groups, outline)
    sender = None if all(have) else source
    for index, shard, kinds in groups.numbered():
        groups.inner.state.pop(shard.tensor, None)
        values = outline["state"].get(index)
        if values:
            mine = state["state"][index] if state is not None else {}
            groups.inner.state[shard.tensor] = {
                key: _run(groups, shard, mine.get(key), sender) if kinds[key] is ELEMENT else value
                for key, value in values.items()
            }
    for options, saved in zip(groups.groups, outline["param_groups"]):
        options.update({key: value for key, value in saved.items() if key != "params"})


def _outline(groups: ShardedGroups, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with shapes in place of tensors that have a value for each element."""
    kinds = {index: found for index, _, found in groups.numbered()}
    outlined = {
        index: {
            key: v.shape if kinds.get(index, {}).get(key) is ELEMENT and hasattr(v, "shape") else v
            for key, v in held.items()
        }
        for index, held in state["state"].items()
    }
    return {"param_groups": state["param_groups"], "state": outlined}


def _expect_fit(groups: ShardedGroups, outline: Mapping[str, Any]) -> None:
    """Refuses another model's state, on every rank, before anything changes."""
    what = f"rank {groups.compressor.rank}: load_state_dict: expected"
    both = groups.groups, outline["param_groups"]
    mine, saved = ([len(group["params"]) for group in one] for one in both)
    if mine != saved:
        raise ValueError(f"{what} groups of {mine} parameters, got groups of {saved}")
    for group, theirs in zip(*both):
        if why := groups.spec.other_class(group, theirs):
            name = groups.spec.optimizer_class.__name__
            raise ValueError(
                f"{what} the state of {name}, got that of another optimizer class, {why}; load it "
                "into the class that saved it"
            )
    for index, shard, kinds in groups.numbered():
        values = outline["state"].get(index) or {}
        if values and set(values) != set(kinds):
            raise ValueError(f"{what} state {sorted(kinds)} of an optimizer, got {sorted(values)}")
        for key, shape in values.items():
            if kinds[key] is ELEMENT and shape != shard.parameter.shape:
                expected = tuple(shard.parameter.shape)
                raise ValueError(f"{what} {key} of {shard.name!r} of shape {expected}, got {shape}")


def _run(groups: ShardedGroups, shard: Shard, whole: Tensor | None, sender: int | None) -> Tensor:
    """This rank's run of a tensor: sent by rank `sender`, or from its own `whole`."""
    compressor, bounds = groups.compressor, shard.item.bounds
    if sender is not None and sender != compressor.rank:
        mine = torch.empty_like(shard.tensor)
        if mine.numel():
            dist.recv(mine, group=compressor.group, group_src=sender)
        return mine
    assert whole is not None
    ordered = _in_memory_order(shard, whole)
    for rank in range(compressor.world_size) if sender is not None else ():
        run = ordered[bounds[rank] : bounds[rank + 1]]
        if rank != sender and run.numel():
            dist.send(run, group=compressor.group, group_dst=rank)
    return ordered[shard.start : shard.stop].clone()


def _in_memory_order(shard: Shard, whole: Tensor) -> Tensor:
    """A tensor of the parameter's shape, flattened in the order of the parameter's memory."""
    p = shard.parameter
    like = shard.tensor
    ordered = torch.empty_strided(p.shape, p.stride(), dtype=like.dtype, device=like.device)
    ordered.copy_(whole)
    return ordered.as_strided((p.numel(),), (1,))


def _gathered(groups: ShardedGroups, shard: Shard, mine: Tensor, to: int) -> Tensor | None:
    """All ranks' runs of a tensor that is sharded like `shard`, in the parameter's shape."""
    compressor = groups.compressor
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
