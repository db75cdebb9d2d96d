"""What zcomm.compress saves of a DDP model, and how training continues from that."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zcomm.base import arguments
from zcomm.base.log import note
from zcomm.ddp.compressor import DdpCompressor
from zcomm.engine.handle import SavedState
from zcomm.engine.tuning.choice import Choice
from zcomm.sharding.hierarchy import Hosts
from zcomm.sharding.residual_store import ResidualStore

_VERSION = 2
_SAME = ("version", "world_size", "rank", "codecs")


class HookSavedState(SavedState):
    """This rank's residuals, keyed by parameter name, the step, and what codec="auto" chose."""

    def __init__(self, compressor: DdpCompressor) -> None:
        self._compressor = compressor

    def state_dict(self) -> dict[str, Any]:
        compressor = self._compressor
        compressor.synchronize()
        compressor.buckets.hold_all()
        return {
            "version": _VERSION,
            "step": compressor.step,
            "scale": compressor.scale,
            "rank": compressor.rank,
            "world_size": compressor.world_size,
            "hosts": str(compressor.feedback.hosts),
            "codecs": {name: item.codec.spec for name, item in compressor.buckets.items.items()},
            "choice": "" if compressor.auto is None else compressor.auto.choice.dumps(),
            "residuals": compressor.feedback.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where the state was saved; refuses another run's before it writes."""
        compressor, rank = self._compressor, self._compressor.rank
        mine = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(mine):
            got = str(sorted(state)) if isinstance(state, Mapping) else arguments.describe(state)
            raise ValueError(
                f"rank {rank}: load_state_dict: expected what handle.state_dict() returned, "
                f"a dict with {sorted(mine)}, got {got}"
            )
        if compressor.auto is not None and set(state["codecs"]) == set(mine["codecs"]):
            mine["codecs"] = state["codecs"]  # it takes the state's choice, or makes its own
        for field in _SAME:
            if state[field] != mine[field]:
                expected, got = arguments.first_difference(mine[field], state[field])
                raise ValueError(
                    f"rank {rank}: load_state_dict: expected {field} {expected}, got {got}; load "
                    "each rank's own state into the same model, codecs and number of ranks"
                )
        resume_choice(compressor, state["choice"])
        residuals = state["residuals"]
        if compressor.auto is not None:
            residuals = self._those_fed_back(residuals)
        if state["hosts"] == mine["hosts"]:
            compressor.feedback.load_state_dict(residuals)
        else:
            _load_regrouped(compressor, state["hosts"], residuals)
        compressor.step = int(state["step"])
        compressor.scale = float(state["scale"])

    def _those_fed_back(self, saved: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
        """The saved residuals of codecs that have some here; zeros for those that had none."""
        self._compressor.buckets.hold_all()
        mine = self._compressor.feedback.state_dict()
        return {hop: {n: saved[hop].get(n, t) for n, t in mine[hop].items()} for hop in mine}


def resumed_choice(compressor: DdpCompressor, saved: str) -> Choice | None:
    """The choice that a saved run made; None if this one makes its own: it has other hosts."""
    if compressor.auto is None or not saved:
        return None
    choice = Choice.loads(saved)
    return choice if choice.hosts == compressor.auto.choice.hosts else None


def resume_choice(compressor: DdpCompressor, saved: str) -> None:
    """Continues with the choice of a saved run, bit for bit; a run on other hosts keeps its own."""
    if compressor.auto is None:
        return
    choice = resumed_choice(compressor, saved)
    if choice is not None:
        compressor.use_codec(choice)
        compressor.auto.settle()
    elif saved and compressor.rank == 0:
        mine, theirs = compressor.auto.choice.codec, Choice.loads(saved).codec
        note(
            f"zcomm: load_state_dict: codec='auto': saved on other hosts, with {theirs!r}; this "
            f"run keeps its own choice, {mine!r}"
        )


def _load_regrouped(
    compressor: DdpCompressor, saved_hosts: str, residuals: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Loads the residuals of ranks that were grouped otherwise. All ranks call it.

    A rank may hold what another one sends now. So they are summed where they belong: at the owners,
    which always send to themselves. The sum over all ranks stays what it was.
    """
    feedback, rank, world_size = compressor.feedback, compressor.rank, compressor.world_size
    table = json.loads(saved_hosts) if saved_hosts != "None" else None
    theirs = None if table is None else Hosts(table, rank)
    owners = range(world_size) if theirs is None else theirs.owners
    items = compressor.buckets.items
    saved = ResidualStore(feedback.dtype, feedback.device, hosts=theirs)
    for name in residuals["sent"]:
        saved.hold([items[name]], rank, name in residuals["owned"], owners)
    saved.load_state_dict(residuals)
    if rank == 0:
        note(
            f"zcomm: load_state_dict: saved with hosts {saved_hosts}, loaded with "
            f"{feedback.hosts}: residuals are summed at their owners"
        )
    side = feedback.side
    for name, storage in sorted(saved.held("sent").items()):
        bounds, whole = storage.item.bounds, storage.spread(0).float()
        run = compressor.sum_runs(whole, bounds, f"load_state_dict of residual {name!r}")
        compressor.raise_failure()
        mine = torch.zeros_like(whole)
        mine[bounds[rank] : bounds[rank + 1]] = run
        feedback.held("sent")[name].gather(side, mine)
    for name, storage in saved.held("owned").items():
        feedback.held("owned")[name].write(side, storage.read(0))
