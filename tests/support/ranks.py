"""The ranks of the tests: forks of one process that imports torch once, which takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import Connection
from typing import Any

from zcomm.launch import rank_process, ranks

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo"]
)


OVER_GLOO = {"ZCOMM_SHM": "0"}


def forked(env: dict[str, str], pipe: Connection, *args: Any) -> None:
    """A rank, forked from the fork server. It ends with the process that started it."""
    os.setsid()  # Ctrl-C is for the parent, which ends its ranks
    rank_process.end_with_parent(os.getppid())
    os.environ.update(env)
    rank_process.be_a_rank(pipe, *args)


class World(ranks.World):
    """Ranks that start in milliseconds and inherit the environment of the first one."""

    def start_rank(self, pipe: Connection, *args: Any) -> ranks.Process:
        return Forked(self.env, pipe, *args)


class Forked:
    """A forked rank, with the part of Popen's interface that a World uses."""

    def __init__(self, *args: Any) -> None:
        self.process = FORKS.Process(target=forked, args=args)
        self.process.start()

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def send_signal(self, number: int) -> None:
        if self.process.pid and self.process.is_alive():
            os.kill(self.process.pid, number)


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 200.0,
    expect_dead: Collection[int] = (),
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """What `fn(rank, world_size, *args)` returned on each rank; see `World.run`."""
    with World(world_size, env=env) as world:
        return world.run(fn, *args, timeout_s=timeout_s, expect_dead=expect_dead)
