"""What a compressed FSDP model saves, for torch.distributed.checkpoint at any number of ranks.

| key | |
| --- | --- |
| `about` | JSON: parameters, codecs, step, world size, and the unit of residuals |
| `residuals` | name → a row for each rank, in the order of the parameter's elements |

Rows are summed when there are fewer ranks to take them. What counts is what they come to in the
gradient that the optimizer sees (`unit`): the sum of that over all ranks stays what it was.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zcomm.base import arguments
from zcomm.engine.handle import SavedState
from zcomm.fsdp.compressor import FsdpCompressor
from zcomm.fsdp.modules import ShardedModule, ShardedParameter
from zcomm.sharding.checkpoint_tensors import ResidualRow, SavedRow
from zcomm.sharding.hop_storage import HopStorage

_VERSION = 1


class ParameterResidual:
    """A residual in the order of the whole parameter's elements, along whatever it was cut."""

    def __init__(self, storage: HopStorage, p: ShardedParameter, world_size: int) -> None:
        self._storage, self._parameter, self._world_size = storage, p, world_size
        self.whole_numel, self.dtype = p.numel, storage.dtype

    def spread(self, side: int) -> Tensor:
        held, p = self._storage.spread(side), self._parameter
        if p.dim == 0:  # shards follow each other
            return held
        shards = held.view(self._world_size, *p.shard_shape)
        return torch.cat(shards.unbind(), dim=p.dim).flatten()

    def write(self, side: int, values: Tensor) -> None:
        p = self._parameter
        if p.dim != 0:
            shards = values.view(p.shape).chunk(self._world_size, dim=p.dim)
            values = torch.cat([shard.flatten() for shard in shards])
        self._storage.gather(side, values)


class FsdpSavedState(SavedState):
    """Residuals, keyed by parameter, and the step, for torch.distributed.checkpoint."""

    def __init__(self, compressor: FsdpCompressor) -> None:
        self._compressor = compressor

    def state_dict(self) -> dict[str, Any]:
        compressor = self._compressor
        compressor.synchronize()
        choice = compressor.choice()
        fed_back = compressor.routes.fed_back()
        about = {
            **_identity(compressor),
            "step": compressor.step,
            "choice": "" if choice is None else choice.dumps(),
            "world_size": _world(compressor.modules[0])[1],
            "units": {p.name: module.residual_unit() for module, p in fed_back},
        }
        side = compressor.feedback.side
        rows = {
            p.name: ResidualRow.of(_residual(compressor, module, p), side, *mine)
            for module, p in fed_back
            for mine in [(*_world(module), _sharers(compressor, module))]
            if p.numel
        }
        return {"about": json.dumps(about), "residuals": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what was saved; refuses what does not fit before it changes anything."""
        compressor = self._compressor
        about, rows = _checked_about(compressor, state), state["residuals"]
        fed_back = compressor.routes.fed_back()
        for module, p in fed_back:
            _expect_own(rows.get(p.name), compressor, module, p)
        for module, p in fed_back:
            if p.numel:
                values = rows[p.name].values()
                unit = about["units"][p.name] / module.residual_unit()
                residual = _residual(compressor, module, p)
                residual.write(compressor.feedback.side, values if unit == 1 else values * unit)
        compressor.step = int(about["step"])


def _residual(
    compressor: FsdpCompressor, module: ShardedModule, p: ShardedParameter
) -> ParameterResidual:
    storage = compressor.feedback.held("sent")[p.name]
    return ParameterResidual(storage, p, module.world_size)


def _world(module: ShardedModule) -> tuple[int, int]:
    """This rank among all that have a residual of the module's parameters, and their number."""
    rank = module.replica * module.world_size + module.rank
    return rank, module.world_size * module.replicas


def _sharers(compressor: FsdpCompressor, module: ShardedModule) -> tuple[int, ...]:
    """The ranks of this host, which share a residual's elements; this one alone with one hop."""
    hosts, (rank, _) = compressor.hosts(module), _world(module)
    first = rank - module.rank
    return (rank,) if hosts is None else tuple(first + r for r in hosts.neighbours)


def _identity(compressor: FsdpCompressor) -> dict[str, Any]:
    """What must be the same where a state is loaded."""
    parameters = [p for module in compressor.modules for p in module.parameters]
    return {
        "version": _VERSION,
        "parameters": {p.name: list(p.shape) for p in parameters},
        "codecs": {p.name: compressor.routes.codec(p).spec for p in parameters},
        "with residuals": [p.name for _, p in compressor.routes.fed_back()],
    }


def _checked_about(compressor: FsdpCompressor, state: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(state, Mapping) or set(state) != {"about", "residuals"}:
        got = str(sorted(state)) if isinstance(state, Mapping) else arguments.describe(state)
        raise ValueError(
            "zcomm.fsdp: load_state_dict: expected what handle.state_dict() returned, a dict with "
            f"'about' and 'residuals', got {got}"
        )
    about: dict[str, Any] = json.loads(state["about"])
    if compressor.choice() is not None and not compressor.resume_choice(about.get("choice", "")):
        mine = _identity(compressor)  # it keeps its own choice
        about |= {field: mine[field] for field in ("codecs", "with residuals")}
    for field, expected in json.loads(json.dumps(_identity(compressor))).items():
        if about.get(field) != expected:
            what, theirs = arguments.first_difference(expected, about.get(field))
            raise ValueError(
                f"zcomm.fsdp: load_state_dict: expected {field} {what}, got {theirs}; load the "
                "state into the same model, codecs and feedback"
            )
    return about


def _expect_own(
    row: object, compressor: FsdpCompressor, module: ShardedModule, p: ShardedParameter
) -> None:
    """Refuses the row of another rank, where no checkpoint has dealt them out."""
    mine = *_world(module), _sharers(compressor, module)
    if isinstance(row, SavedRow) and (row.rank, row.world_size, row.sharers) != mine:
        raise ValueError(
            f"zcomm.fsdp: load_state_dict: residual of {p.name!r}: expected that of rank {mine[0]} "
            f"of {mine[1]} with ranks {list(mine[2])} on its host, got that of rank {row.rank} of "
            f"{row.world_size} with {list(row.sharers)}; use torch.distributed.checkpoint to load "
            "it at another number of ranks or hosts"
        )
