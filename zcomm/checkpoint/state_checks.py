"""Refuses a state that would not be complete on disk, and a folder that belongs to other ranks."""

import importlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zcomm.checkpoint.agreement import on_every_rank, ranks_of
from zcomm.ddp.parameters import module_of
from zcomm.torch_private import checkpoint
from zcomm.transport.channels import group_of, group_timeout_s, member_of
from zcomm.transport.failure_notes import CommunicationError
from zcomm.transport.handshake import Caller
from zcomm.transport.store import Store, StoreError
from zcomm.zero.optimizer import ZeroOptimizer


def checked_caller(what: str, state: Mapping[str, Any], group: Any) -> Caller:
    """Who calls, and how patient it is; refuses a state that would not be complete."""
    group = group_of(group, what)
    member_of(group, what)
    optimizers = [value for value in state.values() if isinstance(value, ZeroOptimizer)]
    for optimizer in optimizers:
        _expect_own_group(what, optimizer, ranks_of(group))
        _expect_whole_models(what, optimizer, state.values())
    _expect_group_for_torch(what, ranks_of(group))
    try:
        importlib.import_module("numpy")
    except ImportError as error:
        raise RuntimeError(
            f"{what}: expected NumPy, which torch.distributed.checkpoint needs, got none; "
            "use pip install numpy"
        ) from error
    own = (optimizer.compressor.timeout_s(group) for optimizer in optimizers)
    return Caller(what, group, min(own, default=group_timeout_s(group)))


def _expect_group_for_torch(what: str, ranks: list[int]) -> None:
    """Refuses a group with which an older torch.distributed.checkpoint fails."""
    if ranks[0] != 0 and not checkpoint.takes_any_group():
        raise ValueError(
            f"rank {dist.get_rank()}: {what}: expected a group whose first rank is 0, got ranks "
            f"{ranks}: torch {torch.__version__} has no checkpoints of others; install torch 2.8 "
            "or later"
        )


def _expect_own_group(what: str, optimizer: ZeroOptimizer, ranks: list[int]) -> None:
    """Refuses another group: models of other groups name their shards alike, and one gets lost."""
    own = ranks_of(optimizer.compressor.group)
    if own != ranks:
        raise ValueError(
            f"rank {dist.get_rank()}: {what}: expected group= that of the optimizer's model, ranks "
            f"{own}, got ranks {ranks}; over one dimension of a mesh use group=mesh['dp'], and a "
            "folder for each of its groups"
        )


def _expect_whole_models(what: str, optimizer: ZeroOptimizer, values: Iterable[Any]) -> None:
    """Refuses a model without some of its optimizer's parameters."""
    ddp = optimizer.compressor.ddp()
    for model in values:
        if isinstance(model, nn.Module) and ddp is not None and model in (ddp, module_of(ddp)):
            named = {id(p) for p in model.parameters()}
            lost = [s.name for s in optimizer.shards.values() if id(s.parameter) not in named]
            if lost:
                raise ValueError(
                    f"{what}: expected a model that has all parameters of its optimizer, got one "
                    f"without {lost[0]!r}: torch takes tensor-parallel parameters out of it in the "
                    "first forward pass; put dict(model.named_parameters()), made before that, in "
                    "place of the model"
                )


def expect_one_save(root: Path, step: int, caller: Caller) -> None:
    """Refuses ranks that save different steps, and a folder to which a disjoint group saves."""
    first = dist.get_rank(caller.group) == 0
    everyone = on_every_rank(lambda: (step, _claim(root, caller) if first else None), caller)
    steps, others = [its for its, _ in everyone], everyone[0][1]
    if len(set(steps)) > 1:
        raise ValueError(
            f"rank {dist.get_rank()}: save_checkpoint: expected the same step on all ranks, got "
            f"{dict(zip(ranks_of(caller.group), steps))}"
        )
    if others:
        raise ValueError(
            f"rank {dist.get_rank()}: save_checkpoint: expected a folder of its own for each "
            f"group, got {str(root)!r}, to which ranks {others} save; add to its name, such as "
            "f'{folder}/tp{mesh.get_local_rank(\"tp\")}'"
        )


def _claim(root: Path, caller: Caller) -> list[int] | None:
    """Claims a folder for a group; returns the ranks of a disjoint group that has it already."""
    key, mine = str(root.resolve()), ranks_of(caller.group)

    def claim(store: Any) -> list[int] | None:
        found: list[int] = json.loads(store.compare_set(key, "", json.dumps(mine)))
        if set(found).isdisjoint(mine):
            return found
        store.set(key, json.dumps(mine))
        return None

    try:
        others: list[int] | None = Store("checkpoints").answer(claim, caller.timeout_s)
    except StoreError as lost:
        raise CommunicationError(
            f"rank {dist.get_rank()}: {caller.what}: {lost}: its process died or stopped, or its "
            "host cannot be reached"
        ) from lost
    return others
