"""Wrong uses of the hook: each is an error that says what to do."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import Net, batch, seeded
from raised import Raised, raised
from ranks import World

pytest_plugins = ["ddp_ranks"]


def wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(seeded(Net), bucket_cap_mb=0.02)


def step(ddp: Any, rank: int = 0, number: int = 0) -> None:
    ddp(batch(rank, number)).square().mean().backward()


def refused_uses(rank: int, world_size: int) -> dict[str, Raised]:
    twice = wrapped()
    handle = zcomm.compress(torch.compile(twice, backend="eager"), "lm4")
    frozen = DistributedDataParallel(seeded(Net), find_unused_parameters=True)
    frozen.module.first.requires_grad_(False)
    zcomm.compress(frozen, "lm4")
    state, one, two = zcomm.HookState("lm4"), wrapped(), wrapped()
    one.register_comm_hook(state, zcomm.hook)
    two.register_comm_hook(state, zcomm.hook)
    step(one)
    stateless = wrapped()
    stateless.register_comm_hook(None, zcomm.hook)
    refused = {
        "second compress": raised(zcomm.compress, twice, "lm4"),
        "no DDP model": raised(zcomm.compress, twice.module, "lm4"),
        "no state": raised(step, stateless),
        "frozen after wrapping": raised(step, frozen),
        **unfrozen_after_wrapping(),
        "one state, two models": raised(step, two),
        "remove": raised(handle.remove),
    }
    step(twice)  # the refused call did no harm
    return refused


def unfrozen_after_wrapping() -> dict[str, Raised]:
    """Before and after the hook met the model; the next step says it, too."""
    refused = {}
    for when in ("before", "after"):
        model = seeded(Net)
        model.first.requires_grad_(False)
        ddp = DistributedDataParallel(model)
        model.first.requires_grad_(when == "before")
        zcomm.compress(ddp, "lm4")
        if when == "after":
            step(ddp)
            model.first.requires_grad_(True)
        for number in (1, 2):
            refused[f"unfrozen {when}, {number}"] = raised(step, ddp)
    return refused


def test_wrong_uses_are_refused(pair: World) -> None:
    for refused in pair.run(refused_uses):
        for name, kind, message in [
            ("second compress", "ValueError", "expected a model without a comm hook, got one with"),
            ("no DDP model", "TypeError", "expected a DistributedDataParallel, got"),
            ("frozen after wrapping", "ValueError", "freeze parameters before wrapping the model"),
            ("one state, two models", "ValueError", "use one HookState for one model"),
            ("remove", "RuntimeError", "no way to remove a comm hook"),
            ("no state", "TypeError", "expected a zcomm.HookState, got None; use"),
            *(
                (f"unfrozen {when}, {number}", "ValueError", "got 'first.weight', unfrozen since")
                for when in ("before", "after")
                for number in (1, 2)
            ),
        ]:
            assert refused[name].type == kind, name
            assert message in refused[name].text
