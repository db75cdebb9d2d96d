"""Where the ranks of a command run: started here, or this process is one of torchrun's."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from zcomm.launch import hosts
from zcomm.report.units import UsageError
from zcomm.transport.channels import gather_bytes

LOOPBACK = "loopback"
# Besides tensors: what Python, torch and the engine of one rank need.
RANK_NBYTES = 400 << 20


class Place(NamedTuple):
    """`run(fn, *args)` gives what `fn(rank, world_size, *args)` returned on each rank."""

    run: Callable[..., list[Any]]
    ranks: int
    ranks_here: int  # that share this machine's processor and memory
    per_host: int
    link: str
    leads: bool = True  # one of the processes of a command speaks for all of them


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def leads() -> bool:
    return not under_torchrun() or os.environ["RANK"] == "0"


def planned(count: int | None, host_count: int | None, default: int = 2) -> tuple[int, int]:
    """How many ranks there will be, in all and on this machine."""
    if not under_torchrun():
        world_size = host_count or count or default
        return world_size, world_size
    if count or host_count:
        option = "--ranks" if count else "--hosts"
        raise UsageError(f"expected no {option} under torchrun, which starts the ranks; leave it")
    world_size = int(os.environ["WORLD_SIZE"])
    return world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


@contextlib.contextmanager
def started(
    world_size: int, on_hosts: bool, rate: str | None, per_host: int = 1
) -> Iterator[Place]:
    """Ranks on this machine: on loopback, or on hosts of their own behind links."""
    host_count = world_size // per_host if on_hosts else None
    with hosts.world(world_size, host_count, rate) as world:

        def run(fn: Callable[..., Any], *args: Any) -> list[Any]:
            return world.run(fn, *args, timeout_s=3600)

        link = rate.lower() if rate else LOOPBACK
        each = per_host if on_hosts else world_size
        yield Place(run, world_size, world_size, each, link)


@contextlib.contextmanager
def joined(backend: str) -> Iterator[Place]:
    """This process as a rank of torchrun's: every rank calls run() with the same function."""
    _, here = planned(None, None)
    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def run(fn: Callable[..., Any], *args: Any) -> list[Any]:
        mine = pickle.dumps(fn(rank, world_size, *args))
        return [pickle.loads(theirs) for theirs in gather_bytes(mine)]

    try:
        link = os.environ.get("GLOO_SOCKET_IFNAME", "network")
        yield Place(run, world_size, here, here, link, leads=rank == 0)
    finally:
        dist.destroy_process_group()


def expect_memory(nbytes: float, here: int, option: str) -> None:
    """Refuses what would take more memory than is free: `nbytes` on each of the ranks here."""
    needed = here * (nbytes + RANK_NBYTES)
    free = free_nbytes()
    if needed > free:
        raise UsageError(
            f"expected {option} to fit into the {free / 2**30:.1f} GiB that are free here, got one "
            f"that needs {needed / 2**30:.1f} GiB on {here} ranks; choose a smaller one"
        )


def free_nbytes() -> float:
    """Memory that can be had without swapping, also inside a container with a limit."""
    return min(machine_free_nbytes(), container_free_nbytes())


def machine_free_nbytes() -> float:
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024.0
    return float("inf")


def container_free_nbytes() -> float:
    cgroup = Path("/sys/fs/cgroup")
    try:
        most = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if most == "max" else int(most) - used
