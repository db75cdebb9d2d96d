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
from torch import Tensor

from zcomm.sharding.checkpoint_tensors import StateShard
from zcomm.transport.handshake import agree, fresh_name, tells_others
from zcomm.transport.point_to_point import PointToPoint
from zcomm.zero.elementwise import ELEMENT, options_of
from zcomm.zero.groups import ShardedGroups
from zcomm.zero.shards import Shard
from zcomm.zero.state import own_part


def is_ordinary_state(state: object) -> bool:
    return isinstance(state, Mapping) and set(state) == {"state", "param_groups"}


def _group_of(groups: ShardedGroups, *_: Any, **__: Any) -> Any:
    return groups.compressor.group


@tells_others("consolidated_state_dict", _group_of)
def consolidate(groups: ShardedGroups, to: int, initial: bool = False) -> dict[str, Any] | None:
    """Collective: returns the state on rank `to`, None on the others.

    With `initial`, parameters that have no state yet get the initial one.
    """
    compressor = groups.compressor
    is_here = compressor.rank == to
    compressor.raise_failure()
    if not 0 <= to < compressor.world_size:
        raise ValueError(
            f"rank {compressor.rank}: consolidated_state_dict: expected a rank < "
            f"{compressor.world_size}, got {to}"
        )
    caller = compressor.caller("consolidated_state_dict", compressor.group)
    everyone = agree({"to": str(to)}, [caller], compressor.rank, {"name": fresh_name()})
    peers = PointToPoint(caller, everyone[to]["name"], hub=to)
    state: dict[int, dict[str, Any]] = {}
    for index, shard, kinds in groups.numbered():
        held = groups.state_of(shard) if initial else groups.inner.state.get(shard.tensor)
        if held:
            state[index] = {
                key: _gathered(groups, shard, value, peers)
                if kinds.get(key) is ELEMENT
                else copy.deepcopy(value)
                for key, value in held.items()
            }
    return {"state": state, "param_groups": numbered_groups(groups)} if is_here else None


def numbered_groups(groups: ShardedGroups) -> list[dict[str, Any]]:
    """The param groups with numbers in place of parameters, as torch saves them."""
    numbers = count()
    return [
        {**options_of(group), "params": [next(numbers) for _ in group["params"]]}
        for group in groups.groups
    ]


@tells_others("load_state_dict", _group_of)
def load_ordinary(groups: ShardedGroups, state: Mapping[str, Any] | None) -> None:
    """Collective: each rank takes its runs from its own copy of the state, or is sent them."""
    compressor, state = groups.compressor, state and _by_number(state)
    caller = compressor.caller("load_state_dict", compressor.group)
    have, names = zip(*caller.gather_json((state is not None, fresh_name())))
    source = have.index(True) if True in have else None
    sender = None if all(have) else source
    if source is None:
        raise ValueError(
            f"rank {groups.compressor.rank}: load_state_dict: expected a state on at least one "
            "rank, got None on all of them"
        )
    mine = pickle.dumps(_outline(groups, state)) if state and source == compressor.rank else b""
    outline = pickle.loads(caller.gather(mine)[source])
    _expect_fit(groups, outline, sender)
    peers = None if sender is None else PointToPoint(caller, names[sender], hub=sender)
    for index, shard, kinds in groups.numbered():
        groups.inner.state.pop(shard.tensor, None)
        values = outline["state"].get(index)
        if values:
            mine = state["state"][index] if state is not None else {}
            groups.inner.state[shard.tensor] = {
                key: _run(groups, shard, mine.get(key), peers) if kinds[key] is ELEMENT else value
                for key, value in values.items()
            }
    for options, saved in zip(groups.groups, outline["param_groups"]):
        options.update(options_of(saved))


def _by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with its parameters numbered in the order of the groups, whatever they are called.

    torch's set_optimizer_state_dict calls them by name.
    """
    if not all("params" in group for group in state["param_groups"]):
        raise ValueError(
            "load_state_dict: expected the state of a torch optimizer, with 'params' in each of "
            "its param_groups, got one without; give what optimizer.state_dict() returned"
        )
    names = [name for group in state["param_groups"] for name in group["params"]]
    held = state["state"]
    numbered = {number: held[name] for number, name in enumerate(names) if name in held}
    return {"state": numbered, "param_groups": state["param_groups"]}


def _outline(groups: ShardedGroups, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with shapes in place of tensors that have a value for each element."""
    kinds = {index: found for index, _, found in groups.numbered()}
    outlined = {
        index: {
            key: v.size() if kinds.get(index, {}).get(key) is ELEMENT and torch.is_tensor(v) else v
            for key, v in held.items()
        }
        for index, held in state["state"].items()
    }
    values = [value for held in state["state"].values() for value in held.values()]
    return {
        "param_groups": state["param_groups"],
        "state": outlined,
        "is_sharded": any(isinstance(value, StateShard) for value in values),
    }


def _expect_fit(groups: ShardedGroups, outline: Mapping[str, Any], sender: int | None) -> None:
    """Refuses another model's state, on every rank, before anything changes."""
    what = f"rank {groups.compressor.rank}: load_state_dict: expected"
    if outline["is_sharded"] and sender is not None:
        raise ValueError(
            f"{what} shards on all ranks, or a whole state, got rank {sender}'s shards only; use "
            "StateDictOptions(full_state_dict=True) to save it"
        )
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


def _run(
    groups: ShardedGroups, shard: Shard, whole: Tensor | None, peers: PointToPoint | None
) -> Tensor:
    """This rank's run of a tensor: sent by the hub, or from its own `whole`."""
    compressor, bounds = groups.compressor, shard.item.bounds
    if peers is not None and peers.hub != compressor.rank:
        mine = torch.empty_like(shard.tensor)
        if mine.numel():
            peers.recv(mine, peers.hub)
        return mine
    assert whole is not None
    if isinstance(whole, StateShard):
        part: Tensor = own_part(shard, "state", whole)
        return part.to(shard.tensor.dtype, copy=True)
    ordered = _in_memory_order(shard, whole)
    if peers is not None:
        for rank in range(compressor.world_size):
            run = ordered[bounds[rank] : bounds[rank + 1]]
            if rank != compressor.rank and run.numel():
                peers.send(run, rank)
    return ordered[shard.start : shard.stop].clone()


def _in_memory_order(shard: Shard, whole: Tensor) -> Tensor:
    """A tensor of the parameter's shape, flattened in the order of the parameter's memory."""
    p = shard.parameter
    like = shard.tensor
    ordered = torch.empty_strided(p.shape, p.stride(), dtype=like.dtype, device=like.device)
    ordered.copy_(whole)
    return ordered.as_strided((p.numel(),), (1,))


def _gathered(
    groups: ShardedGroups, shard: Shard, mine: Tensor, peers: PointToPoint
) -> Tensor | None:
    """All ranks' runs of a tensor that is sharded like `shard`, in the parameter's shape."""
    compressor, bounds = groups.compressor, shard.item.bounds
    if compressor.rank != peers.hub:
        if mine.numel():
            peers.send(mine.contiguous(), peers.hub)
        return None
    whole = torch.empty(shard.item.numel, dtype=mine.dtype, device=mine.device)
    whole[shard.start : shard.stop] = mine
    for rank in range(compressor.world_size):
        part = whole[bounds[rank] : bounds[rank + 1]]
        if rank != peers.hub and part.numel():
            peers.recv(part, rank)
    return whole.as_strided(shard.parameter.shape, shard.parameter.stride())
