"""Trainings that are saved and go on, on the ranks of a test."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import Net, batch, seeded
from raised import Raised, raised
from zcomm.sharding.checkpoint_tensors import StateShard

BOTH_WAYS: dict[str, Any] = {"codec": "lm4", "param_codec": "lm4", "feedback": True}


class Training:
    """A Net under DDP and a ZeroOptimizer, on batches of this rank's own."""

    def __init__(self, settings: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> None:
        options = {"optimizer": torch.optim.AdamW, "lr": 1e-2, **settings}
        self.model = seeded(Net).to(dtype)
        self.dtype = dtype
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.1)
        self.opt = zcomm.ZeroOptimizer(self.ddp, options.pop("optimizer"), **options)

    def run(self, rank: int, steps: range) -> None:
        for step in steps:
            self.opt.zero_grad()
            loss = self.ddp(batch(rank, step).to(self.dtype)).float().square().mean()
            loss.backward()
            self.opt.step()

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.opt}

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def save(rank: int, world_size: int, folder: Path, settings: Any, steps: int) -> Any:
    """Trains and saves; what all ranks together have, on rank 0."""
    training = Training(settings)
    training.run(rank, range(steps))
    dcp.save(training.parts(), checkpoint_id=folder)
    return books(training)


def load(rank: int, world_size: int, folder: Path, settings: Any) -> Any:
    training = Training(settings)
    dcp.load(training.parts(), checkpoint_id=folder)
    return books(training)


def books(training: Training) -> dict[str, Any]:
    """All state: `whole` is the same for any number of ranks, `residuals` are this rank's."""
    opt = training.opt
    state = opt.state_dict()
    return {
        "whole": opt.consolidated_state_dict(),
        "parameters": training.parameters(),
        "masters": {name: (part.start, part.part()) for name, part in state["masters"].items()},
        "residuals": {n: row.values().clone() for n, row in state["residuals"]["sent"].items()},
        "step": opt.compressor.step,
    }


def go_on(
    rank: int, world_size: int, folder: Path, settings: Any, dtype: torch.dtype, order: str
) -> tuple[Any, Any]:
    """Parameters after 8 steps: in one go, and saved after 4 and loaded by a new training."""
    whole = Training(settings, dtype)
    whole.run(rank, range(4))
    zcomm.save_checkpoint(folder, whole.parts(), 4)
    whole.run(rank, range(4, 8))
    new = Training(settings, dtype)
    new.run(rank, range(20, 22))  # something else, which must leave no trace
    if order == "model last":
        zcomm.load_checkpoint(folder, {"optimizer": new.opt})
        zcomm.load_checkpoint(folder, {"model": new.model})
    else:
        assert zcomm.load_checkpoint(folder, new.parts()) == 4
    new.run(rank, range(4, 8))
    return whole.parameters(), new.parameters()


def to_plain_and_back(rank: int, world_size: int, to: int) -> Any:
    """An ordinary optimizer that takes over, and a sharded one that takes over from it."""
    training = Training({"codec": "none", "weight_decay": 0.1})
    training.run(rank, range(3))
    state = training.opt.consolidated_state_dict(to)
    assert (state is None) == (rank != to)
    if state is not None:
        plain = torch.optim.AdamW(training.model.parameters(), lr=1.0)
        plain.load_state_dict(state)
        state = plain.state_dict()
    new = Training({"codec": "none", "lr": 0.5})
    new.model.load_state_dict(training.model.state_dict())
    new.opt.load_state_dict(state)  # None but on one rank
    again = new.opt.consolidated_state_dict(to)
    for one in (training, new):
        one.run(rank, range(3, 6))
    return state, again, training.parameters(), new.parameters()


def load_whole_everywhere(rank: int, world_size: int, state: Any) -> Any:
    training = Training({"codec": "none"})
    training.opt.load_state_dict(state)
    return training.opt.consolidated_state_dict()


def keep_in_memory(rank: int, world_size: int) -> Any:
    """A copy of the state, and one that went through a pickle, after which training starts anew."""
    training = Training(BOTH_WAYS)
    training.run(rank, range(3))
    parameters = training.parameters()
    copied = copy.deepcopy(training.opt.state_dict())
    pickled = pickle.loads(pickle.dumps(copied))
    results = []
    for state in (copied, pickled):
        training.opt.load_state_dict(state)
        training.model.load_state_dict(parameters)
        training.run(rank, range(3, 5))
        results.append(training.parameters())
    return results


def load_errors(rank: int, world_size: int, folder: Path) -> dict[str, Raised]:
    """What loading into something else says; the optimizer is as it was afterwards."""
    zcomm.save_checkpoint(folder, Training({"codec": "lm4"}).parts(), 1)
    others = {
        "codec": {"codec": "int8"},
        "param_codec": {"codec": "lm4", "param_codec": "lm4"},
        "optimizer": {"codec": "lm4", "optimizer": torch.optim.Adam},
    }
    errors = {}
    for name, settings in others.items():
        training = Training(settings)
        errors[name] = raised(zcomm.load_checkpoint, folder, training.parts())
        training.run(rank, range(1))
    other = DistributedDataParallel(torch.nn.Linear(64, 64))
    opt = zcomm.ZeroOptimizer(other, torch.optim.AdamW, codec="lm4")
    errors["parameters"] = raised(zcomm.load_checkpoint, folder, {"optimizer": opt})
    errors["not a state"] = raised(opt.load_state_dict, {"a": 1})
    errors["no state"] = raised(opt.load_state_dict, None)
    return errors


class Deadly(StateShard):
    """Kills its process when it is to be written."""

    def __get_tensor_shard__(self, index: object) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return self.part()


def save_and_die(rank: int, world_size: int, folder: Path) -> None:
    """The second save ends with rank 1 dead, in the middle of its file."""
    training = Training(BOTH_WAYS)
    training.run(rank, range(2))
    zcomm.save_checkpoint(folder, training.parts(), 2)
    training.run(rank, range(2, 4))
    kind = Deadly if rank == 1 else StateShard
    last = {"part": kind.of(torch.zeros(8), 8 * rank, 8 * world_size)}
    zcomm.save_checkpoint(folder, {**training.parts(), "last": last}, 4)


def load_and_save_again(rank: int, world_size: int, folder: Path) -> tuple[Any, Any, list[str]]:
    training = Training(BOTH_WAYS)
    step = zcomm.load_checkpoint(folder, training.parts())
    loaded = training.parameters()
    expected = Training(BOTH_WAYS)
    expected.run(rank, range(2))
    for number in (2, 3, 4):
        zcomm.save_checkpoint(folder, training.parts(), number)
    dist.barrier()  # rank 0 drops old ones last
    names = sorted(path.name for path in folder.iterdir())
    return step, (loaded, expected.parameters()), names
