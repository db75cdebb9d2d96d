"""Trainings whose states go through torch.distributed.checkpoint.state_dict."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as api
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_training import seeded
from everyones import everyones
from raised import raised
from zero_training import Assorted, backward, parameters, plain, zero

FULL = api.StateDictOptions(full_state_dict=True)
ON_RANK_0 = api.StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLAT = api.StateDictOptions(flatten_optimizer_state_dict=True)
KINDS = {"zero": zero, "plain": plain}


class Shapes(Assorted):
    """Parameters of all shapes and orders in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(5, 7, 3).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        images = x.flatten()[:180].view(1, 5, 6, 6).to(memory_format=torch.channels_last)
        return super().forward(x) + self.kernel(images).mean()


class Training:
    """Two param groups; frozen parameters among them."""

    def __init__(self, kind: str, lr: float = 1e-2) -> None:
        self.model = seeded(Shapes)
        self.ddp = DistributedDataParallel(self.model)
        both = list(self.model.parameters())
        groups = [{"params": both[:3]}, {"params": both[3:], "lr": lr / 2}]
        self.opt = KINDS[kind](AdamW, lr=lr)(self.ddp, groups)

    def run(self, rank: int, *steps: int) -> Training:
        for step in steps:
            self.opt.zero_grad()
            backward(self.ddp, rank, step)
            self.opt.step()
        return self

    def get(self, options: Any = None) -> Any:
        """A copy: a plain optimizer's state is its own memory."""
        return copy.deepcopy(api.get_optimizer_state_dict(self.ddp, self.opt, options=options))

    def set(self, state: Any, options: Any = None) -> Training:
        api.set_optimizer_state_dict(self.ddp, self.opt, state, options=options)
        return self

    def save(self, folder: Path) -> None:
        model, optimizer = api.get_state_dict(self.model, self.opt)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path) -> Training:
        model, optimizer = api.get_state_dict(self.model, self.opt)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder)
        api.set_state_dict(
            self.model,
            self.opt,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return self


def save(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Each kind of optimizer after two steps, in files and whole; the one it ends with after two
    more."""
    found = {}
    for kind in KINDS:
        training = Training(kind).run(rank, 0, 1)
        training.save(folder / kind)
        state = training.get(FULL)
        found[kind] = state, parameters(training.run(rank, 2, 3).model)
    return found


def load(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """What each kind has after loading the other's files, and its own; and two steps later."""
    found = {}
    for saved in KINDS:
        for kind in KINDS:
            training = Training(kind, lr=0.5).load(folder / saved)
            state = training.get(FULL)
            found[saved, kind] = state, parameters(training.run(rank, 2, 3).model)
    return found


def whole_states(rank: int, world_size: int) -> dict[str, Any]:
    """All ways to hand a whole state from one kind of optimizer to the other."""
    found: dict[str, Any] = {}
    for saving, loading in (("zero", "plain"), ("plain", "zero"), ("zero", "zero")):
        old = Training(saving).run(rank, 0, 1)
        whole, on_rank_0 = old.get(FULL), old.get(ON_RANK_0)
        states = {
            "full": Training(loading).set(whole, FULL),
            "not said to be full": Training(loading).set(whole),
            "from rank 0": Training(loading).set({} if rank else whole, FROM_RANK_0),
            "offloaded": Training(loading).set({} if rank else on_rank_0, FROM_RANK_0),
        }
        if loading == "plain":  # torch mixes up the elements of a transposed parameter's state
            del states["from rank 0"], states["offloaded"]
        found |= {(saving, loading, way): new.get(FULL) for way, new in states.items()}
        found[saving, loading, "was on rank 0 only"] = bool(on_rank_0) == (rank == 0)
    return found


def shards(rank: int, world_size: int) -> dict[str, Any]:
    """This rank's part: how much of it there is, flat, handed on, and of another rank."""
    old = Training("zero").run(rank, 0, 1)
    state = old.get()
    values = [v for held in state["state"].values() for v in held.values() if v.dim()]
    flat, plain = old.get(FLAT), Training("plain").run(rank, 0, 1).get(FLAT)
    # Older versions look for the state of parameters that have none, whatever the optimizer.
    takes_flat = raised(Training("plain").set, plain, FLAT).type == "NoneType"
    everyone = everyones(state)
    return {
        "expected": old.get(FULL),
        "elements": sum(v.numel() for v in values),
        "names": sorted(flat),
        "again": Training("zero").set(state).get(FULL),
        "flat": Training("zero").set(flat, FLAT).get(FULL) if takes_flat else None,
        "plain": sorted(plain),
        "another rank's": raised(Training("zero").set, everyone[1 - rank]),
        "one rank's": raised(Training("zero").opt.load_state_dict, None if rank else state),
    }


def before_the_first_step(rank: int, world_size: int, folder: Path) -> tuple[Any, Any]:
    """A checkpoint of a new optimizer. Asking for the state changes no step."""
    asked, new = Training("zero"), Training("zero")
    asked.save(folder)
    loaded = Training("zero", lr=0.5).load(folder).get(FULL)
    expected = Training("plain").get(FULL)
    assert Training("zero").get(FULL)["param_groups"] == expected["param_groups"]
    for one in (asked, new):
        one.run(rank, 0, 1)
    same = all(torch.equal(a, b) for a, b in zip(asked.model.parameters(), new.model.parameters()))
    return same, [loaded["state"], expected["state"]]
