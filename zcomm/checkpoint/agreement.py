"""What the ranks of a checkpoint tell each other, so that all of them go on or all of them fail."""

import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch.distributed as dist

from zcomm.transport.handshake import Caller

_PAUSE_S = 0.1  # between two looks at a folder


class Seen(NamedTuple):
    """What a rank sees: "" if it is what was expected, else the problem."""

    rank: int
    host: str
    problem: str


def ranks_of(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def on_every_rank(work: Callable[[], Any], caller: Caller) -> list[Any]:
    """The results of all ranks. If it fails on one of them, all raise its error."""
    done: tuple[Any, str] = None, ""
    try:
        done = work(), ""
    except Exception as error:
        done = None, f"{type(error).__name__}: {error}"
    everyone = caller.gather_json(done)
    for rank, (_, failure) in zip(ranks_of(caller.group), everyone):
        if failure:
            raise OSError(f"rank {dist.get_rank()}: checkpoint: rank {rank} failed: {failure}")
    return [result for result, _ in everyone]


def on_rank_0(work: Callable[[], Any], caller: Caller) -> Any:
    """Runs `work` on the group's rank 0; all ranks return its result, or raise its error."""
    first = dist.get_rank(caller.group) == 0
    return on_every_rank(lambda: work() if first else None, caller)[0]


def everyone_sees(problem: Callable[[], str], wait_s: float, caller: Caller) -> list[Seen]:
    """Each rank's host, and the problem that it still sees after `wait_s`."""
    found = on_every_rank(lambda: (socket.gethostname(), waited_for(problem, wait_s)), caller)
    return [Seen(rank, host, left) for rank, (host, left) in zip(ranks_of(caller.group), found)]


def waited_for(problem: Callable[[], str], wait_s: float) -> str:
    """Looks again until there is no problem: network file systems show new files late."""
    deadline = time.monotonic() + wait_s
    while found := problem():
        if time.monotonic() >= deadline:
            return found
        time.sleep(_PAUSE_S)
    return ""


def named(some: Iterable[Seen]) -> str:
    """ "rank 1 on alpha and ranks 2, 3 on beta"."""
    by_host: dict[str, list[int]] = {}
    for rank, host, _ in some:
        by_host.setdefault(host, []).append(rank)
    return " and ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {host}"
        for host, ranks in by_host.items()
    )
