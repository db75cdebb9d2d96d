"""How a command reaches its ranks: it starts them here, or a launcher started it as one of them."""

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from zcomm.base.host import this_host
from zcomm.launch import hosts
from zcomm.launch.tasks import MEETING_POINT, TORCHRUN, Task, expect_meeting_point, task
from zcomm.report.finding import reason
from zcomm.report.usage import UsageError
from zcomm.transport.channels import group_timeout_s
from zcomm.transport.handshake import Caller

LOOPBACK = "loopback"
MEETING_S = 300.0


class Launcher(NamedTuple):
    """`run(fn, *args)` calls `fn(rank, world_size, *args)` on each rank and returns the results."""

    run: Callable[..., list[Any]]
    ranks: int
    per_host: int
    link: str
    leads: bool = True  # one process prints and writes files for all


class NotMet(UsageError):
    """A rank that could not join the others says so itself: rank 0 may not know."""


def world_sizes(count: int | None, host_count: int | None, default: int = 2) -> tuple[int, int]:
    """How many ranks there will be in all, and on this machine: `count`, or that many per host."""
    one = task()
    if one is None:
        each = count or (1 if host_count else default)
        return (host_count or 1) * each, (host_count or 1) * each
    if count or host_count:
        option = "--ranks" if count else "--hosts"
        raise UsageError(
            f"expected no {option} under {one.launcher}, which starts the ranks; remove it"
        )
    expect_meeting_point(one)
    return one.world_size, one.here


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
def joined(one: Task, backend: str) -> Iterator[Launcher]:
    """Joins the ranks that a launcher started: each of them calls run() with the same function."""
    meet(one, backend)
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


def meet(one: Task, backend: str) -> None:
    """Joins the default group; torchrun's ranks have met before, others may never come."""
    timeout = None if one.launcher == TORCHRUN else timedelta(seconds=MEETING_S)
    try:
        dist.init_process_group(backend, rank=one.rank, world_size=one.world_size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        where = ":".join(os.environ[name] for name in MEETING_POINT)
        raise NotMet(
            f"rank {one.rank}: expected {one.world_size} ranks to meet at {where}, got "
            f"{reason(str(error))}; MASTER_ADDR must be the host of rank 0, and MASTER_PORT a "
            "free port there"
        ) from error
