"""The state of a ZeroOptimizer, sharded, for torch.distributed.checkpoint.

| key | |
| --- | --- |
| `about` | JSON: settings, parameters, step, world size, and which parameters have state |
| `param_groups` | options and parameter names of each group |
| `state` | name → the optimizer's state; tensors with a value per element are shards |
| `masters` | name → fp32 shard, where there is a master |
| `shared` | name → the parameter that all ranks have, where it differs from the rounded master |
| `residuals` | `sent`: name → a row for each rank; `owned`: name → shard |
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm.base import arguments
from zcomm.ddp.compressor import DdpCompressor
from zcomm.ddp.saved_state import resume_choice, resumed_choice
from zcomm.sharding.checkpoint_tensors import ResidualRow, SavedRow, SharedCopy, StateShard
from zcomm.sharding.residual_store import ResidualStore
from zcomm.zero.elementwise import ELEMENT, options_of
from zcomm.zero.groups import ShardedGroups
from zcomm.zero.shards import Shard

_VERSION = 1


def state_dict(groups: ShardedGroups) -> dict[str, Any]:
    """Its tensors are the optimizer's own memory, as in torch."""
    compressor = groups.compressor
    compressor.synchronize()
    compressor.buckets.hold_all()
    about = {
        **groups.identity(),
        "version": _VERSION,
        "world_size": compressor.world_size,
        "step": compressor.step,
        "scale": compressor.scale,
        "choice": "" if compressor.auto is None else compressor.auto.choice.dumps(),
        "initialised": [s.name for s in groups.shards.values() if groups.inner.state.get(s.tensor)],
    }
    masters = [shard for shard in groups.shards.values() if shard.has_master and shard.item.numel]
    shared = [shard for shard in masters if groups.is_coded(shard)]
    return {
        "about": json.dumps(about),
        "param_groups": tuple(
            {**options_of(group), "params": names}
            for group, names in zip(groups.groups, groups.names())
        ),
        "state": {
            shard.name: _saved_state(groups.inner.state.get(shard.tensor), kinds, shard)
            for _, shard, kinds in groups.numbered()
            if kinds
        },
        "masters": {s.name: StateShard.of(s.tensor, s.start, s.item.numel) for s in masters},
        "shared": {s.name: SharedCopy.over(s.run, s.start, s.flat) for s in shared},
        "residuals": _residuals(compressor),
    }


def load_state_dict(groups: ShardedGroups, state: Mapping[str, Any]) -> list[tuple[Shard, Tensor]]:
    """Loads a state; refuses one that does not fit before it changes anything.

    Returns this rank's runs of parameters that the other ranks still need.
    """
    groups.compressor.synchronize()
    about = checked_about(groups, state)
    resume_choice(groups.compressor, about.get("choice", ""))
    loaded = [_Loaded(shard, kinds, state) for _, shard, kinds in groups.numbered()]
    rows = _checked_rows(groups.compressor, state["residuals"]["sent"])
    for group, saved in zip(groups.groups, state["param_groups"]):
        group.update({key: value for key, value in saved.items() if key != "params"})
    initialised = set(about["initialised"])
    for one in loaded:
        one.take(groups.inner, one.shard.name in initialised)
    _load_residuals(groups.compressor, rows, state["residuals"]["owned"])
    groups.compressor.step, groups.compressor.scale = about["step"], about["scale"]
    return [(one.shard, one.run) for one in loaded if one.run is not None and not one.in_parameter]


class _Loaded:
    """The saved state of one shard, checked."""

    def __init__(self, shard: Shard, kinds: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        self.shard = shard
        saved = state["state"].get(shard.name) or _saved_state(None, kinds, shard)
        empty = torch.empty_like(shard.tensor)  # for a parameter without elements
        self.values = {key: own_part(shard, key, saved.get(key, empty)) for key in kinds}
        self.master = own_part(shard, "master", state["masters"].get(shard.name))
        shared = state["shared"].get(shard.name)
        # torch.distributed.checkpoint reads a SharedCopy straight into the parameter.
        self.in_parameter = isinstance(shared, SharedCopy)
        self.run = own_part(shard, "shared copy", shared)

    def take(self, inner: Optimizer, initialised: bool) -> None:
        shard = self.shard
        inner.state.pop(shard.tensor, None)
        if initialised and self.values:
            inner.state[shard.tensor] = self.values
        if self.master is not None:
            shard.tensor.copy_(self.master)
        if self.run is not None:
            shard.loaded_run = self.run.clone()
        shard.mark_unchanged()


def _saved_state(
    held: Mapping[str, Any] | None, kinds: Mapping[str, Any], shard: Shard
) -> dict[str, Any]:
    """One parameter's state; zeros where there is none yet, so that no key is missing."""
    saved: dict[str, Any] = {}
    for key, kind in kinds.items():
        value = held.get(key) if held else None
        if kind is ELEMENT:
            part = torch.zeros_like(shard.tensor) if value is None else value
            if shard.item.numel:  # torch's checkpoints cannot have tensors without elements
                saved[key] = StateShard.of(part, shard.start, shard.item.numel)
        elif value is None:
            saved[key] = torch.zeros_like(kind) if isinstance(kind, Tensor) else kind
        else:
            saved[key] = value
    return saved


def own_part(shard: Shard, key: str, value: Any) -> Any:
    """The memory of a loaded shard, refused if it is another rank's; any other value as it is."""
    if not isinstance(value, StateShard):
        return value
    mine = (shard.start, shard.numel, shard.item.numel)
    theirs = (value.start, value.part().numel(), value.whole)
    if mine != theirs:
        raise ValueError(
            f"load_state_dict: {key} of {shard.name!r}: expected elements from {mine[0]} on, "
            f"{mine[1]} of {mine[2]}, got from {theirs[0]} on, {theirs[1]} of {theirs[2]}; a state "
            "of another rank or number of ranks is loaded with torch.distributed.checkpoint"
        )
    return value.part()


def _residuals(compressor: DdpCompressor) -> dict[str, dict[str, Any]]:
    feedback, rank = compressor.feedback, compressor.rank
    world_size, sharers = compressor.world_size, _sharers(feedback)
    rows = {
        name: ResidualRow.of(storage, feedback.side, rank, world_size, sharers)
        for name, storage in feedback.held("sent").items()
        if storage.item.numel
    }
    owned = {
        name: StateShard.of(s.read(feedback.side), s.item.bounds[rank], s.item.numel)
        for name, s in feedback.held("owned").items()
        if s.item.numel
    }
    return {"sent": rows, "owned": owned}


def _checked_rows(compressor: DdpCompressor, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of this rank's residuals; refuses those of another rank."""
    sharers = _sharers(compressor.feedback) or (compressor.rank,)
    mine = compressor.rank, compressor.world_size, sharers
    for name, row in saved.items():
        if isinstance(row, SavedRow) and (row.rank, row.world_size, row.sharers) != mine:
            raise ValueError(
                f"load_state_dict: residual of {name!r}: expected that of rank {mine[0]} of "
                f"{mine[1]} with ranks {list(sharers)} on its host, got that of rank {row.rank} of "
                f"{row.world_size} with {list(row.sharers)}; use torch.distributed.checkpoint to "
                "load it at another number of ranks or hosts"
            )
    return dict(saved)


def _sharers(feedback: ResidualStore) -> tuple[int, ...]:
    """The ranks of this host, which share a residual's elements: each has its owners'."""
    return feedback.hosts.neighbours if feedback.hosts else ()


def _load_residuals(
    compressor: DdpCompressor, rows: Mapping[str, Any], owned: Mapping[str, StateShard]
) -> None:
    feedback, side = compressor.feedback, compressor.feedback.side
    for name, storage in feedback.held("sent").items():
        if name in rows:
            storage.gather(side, rows[name].values())
    for name, storage in feedback.held("owned").items():
        if name in owned:
            storage.write(side, owned[name].part())


def checked_about(groups: ShardedGroups, state: Mapping[str, Any]) -> dict[str, Any]:
    """The `about` of a state; refuses that of another model, optimizer or codec."""
    rank = groups.compressor.rank
    if not isinstance(state, Mapping) or not {"about", "param_groups"} <= set(state):
        got = str(sorted(state)) if isinstance(state, Mapping) else arguments.describe(state)
        raise ValueError(
            f"rank {rank}: load_state_dict: expected what opt.state_dict() returned, or the state "
            f"of an ordinary optimizer, got {got}"
        )
    about: dict[str, Any] = json.loads(state["about"])
    compressor = groups.compressor
    choice = resumed_choice(compressor, about.get("choice", ""))
    mine = json.loads(json.dumps({**groups.identity(choice), "version": _VERSION}))
    if compressor.auto is not None and choice is None:  # it keeps its own
        mine |= {field: about.get(field) for field in ("codec", "codecs", "feedback")}
    for field, expected in mine.items():
        if about.get(field) != expected:
            what, theirs = arguments.first_difference(expected, about.get(field))
            raise ValueError(
                f"rank {rank}: load_state_dict: expected {field} {what}, got {theirs}; load the "
                "state into the same model, optimizer and codecs"
            )
    return about
