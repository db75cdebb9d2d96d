"""How a command reaches its ranks: it starts them here, or it is itself a rank of torchrun."""

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from zcomm.base.host import this_host
from zcomm.launch import hosts
from zcomm.report.usage import UsageError
from zcomm.transport.channels import group_timeout_s
from zcomm.transport.handshake import Caller

LOOPBACK = "loopback"


class Launcher(NamedTuple):
    """`run(fn, *args)` calls `fn(rank, world_size, *args)` on each rank and returns the results."""

    run: Callable[..., list[Any]]
    ranks: int
    per_host: int
    link: str
    leads: bool = True  # one process prints and writes files for all


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def leads() -> bool:
    return not under_torchrun() or os.environ["RANK"] == "0"


def world_sizes(count: int | None, host_count: int | None, default: int = 2) -> tuple[int, int]:
    """How many ranks there will be in all, and on this machine."""
    if not under_torchrun():
        world_size = host_count or count or default
        return world_size, world_size
    if count or host_count:
        option = "--ranks" if count else "--hosts"
        raise UsageError(f"expected no {option} under torchrun, which starts the ranks; remove it")
    world_size = int(os.environ["WORLD_SIZE"])
    return world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


@contextlib.contextmanager
def local(
    world_size: int, on_hosts: bool, rate: str | None, per_host: int = 1
) -> Iterator[Launcher]:
    """Starts ranks on this machine: on loopback, or on emulated hosts behind links."""
    host_count = world_size // per_host if on_hosts else None
    with hosts.world(world_size, host_count, rate) as world:
        run = partial(world.run, timeout_s=3600)
        link = rate.lower() if rate else LOOPBACK
        each = per_host if on_hosts else world_size
        yield Launcher(run, world_size, each, link)


@contextlib.contextmanager
def torchrun(backend: str) -> Iterator[Launcher]:
    """Joins the ranks that torchrun started: each of them calls run() with the same function."""
    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    host = this_host().dumps().encode()
    caller = Caller("the command", None, group_timeout_s(None))
    here = caller.gather(host).count(host)

    def run(fn: Callable[..., Any], *args: Any) -> list[Any]:
        mine = pickle.dumps(fn(rank, world_size, *args))
        return [pickle.loads(theirs) for theirs in caller.gather(mine)]

    try:
        link = os.environ.get("GLOO_SOCKET_IFNAME", "network")
        yield Launcher(run, world_size, here, link, leads=rank == 0)
    finally:
        dist.destroy_process_group()
