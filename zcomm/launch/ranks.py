"""Runs functions on several ranks of this machine, each a process, all in one gloo group.

A function is sent as its file and name, arguments and results as pickled bytes: no shared memory,
no open files. rank_process.py is at the other end of each pipe. Closing a pipe ends its process.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, Protocol

from zcomm.report.finding import reason

# How long other ranks may take to report errors after the first one, and to exit at the end.
GRACE_S = 1.0
EXIT_S = 60.0
_ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b.*", re.MULTILINE)


class Process(Protocol):
    """The part of Popen used here; the tests fork ranks instead."""

    def wait(self, timeout: float | None = None) -> int: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def send_signal(self, sig: int, /) -> None: ...


@dataclass(frozen=True)
class Answer:
    result: Any = None
    error: str | None = None
    died: bool = False


@dataclass(frozen=True)
class Rank:
    number: int
    process: Process
    pipe: Connection
    stack_file: Path

    def answer(self) -> Answer:
        try:
            error, result = pickle.loads(self.pipe.recv_bytes())
            return Answer(result, error)
        except (EOFError, ConnectionResetError):
            return Answer(error=f"died: {self.how_it_ended()}", died=True)

    def how_it_ended(self) -> str:
        try:
            code = self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return f"does not end\n{self.stack()}"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def stack(self) -> str:
        """The current stacks of its threads."""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        return self.stack_file.read_text() if self.stack_file.exists() else "still starting"


class World:
    """Ranks that keep their process group from one run to the next.

    They start with the first run. If a run fails, all ranks end and the next run starts new ones.
    `env` is added to their environment; `prefixes` has what goes before each rank's command line,
    such as `ip netns exec`.
    """

    def __init__(
        self,
        world_size: int,
        *,
        group_timeout_s: float = 120.0,
        env: Mapping[str, str] | None = None,
        prefixes: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self.world_size = world_size
        self.group_timeout_s = group_timeout_s
        self.env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(env or {})}
        self.prefixes = prefixes or [()] * world_size
        self.ranks: list[Rank] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        stuck = [] if error else self._leave()
        self._kill()
        assert not stuck, "after the last call:\n" + "\n".join(stuck)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = 200.0,
        expect_dead: Collection[int] = (),
    ) -> list[Any]:
        """Runs `fn(rank, world_size, *args)`, a module-level function, and returns the results.

        If a rank fails or dies, or if the run takes too long, an AssertionError says what happened
        on every rank. Ranks in `expect_dead` may die or be stopped: the run does not wait for them,
        their result is None, and all ranks are killed afterwards.
        """
        file = os.path.abspath(inspect.getfile(fn))
        call = pickle.dumps((file, fn.__module__, fn.__name__, pickle.dumps(args)))
        keep = False
        try:
            if not self.ranks:
                self._start()
            for rank in self.ranks:
                with contextlib.suppress(BrokenPipeError):  # already dead: _collect reports it
                    rank.pipe.send_bytes(call)
            results = self._collect(timeout_s, expect_dead)
            keep = not expect_dead
        finally:
            if not keep:
                self._kill()
        return results

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="zcomm-ranks-")
        for number in range(self.world_size):
            ours, theirs = multiprocessing.Pipe()
            args = (number, self.world_size, self.folder.name, self.group_timeout_s)
            with theirs:
                process = self.start_rank(theirs, *args)
            stack_file = Path(self.folder.name, f"stack-{number}")
            self.ranks.append(Rank(number, process, ours, stack_file))

    def start_rank(self, pipe: Connection, number: int, *args: Any) -> Process:
        python = [sys.executable, "-P", "-m", "zcomm.launch.rank_process"]
        numbers = map(str, (os.getpid(), pipe.fileno(), number, *args))
        return subprocess.Popen(
            [*self.prefixes[number], *python, *numbers],
            env={**os.environ, **self.env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[pipe.fileno()],
            start_new_session=True,  # Ctrl-C goes to the parent, which ends its ranks
        )

    def _collect(self, timeout_s: float, expect_dead: Collection[int]) -> list[Any]:
        running = {rank.pipe: rank for rank in self.ranks}
        answers: dict[int, Answer] = {}
        failed: list[int] = []
        deadline = time.monotonic() + timeout_s
        while needed := [rank for rank in running.values() if rank.number not in expect_dead]:
            ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [running.pop(pipe) for pipe in ready]:  # type: ignore[call-overload]
                answers[rank.number] = answer = rank.answer()
                if answer.error and not (answer.died and rank.number in expect_dead):
                    failed.append(rank.number)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        # Deaths first: a peer's error is often their consequence, even if it arrived earlier.
        failed.sort(key=lambda number: not answers[number].died)
        errors = [f"rank {number}: {answers[number].error}" for number in failed]
        for rank in needed:
            hung = f"not finished after {timeout_s:g} s\n{rank.stack()}"
            errors.append(f"rank {rank.number}: {'still running' if failed else hung}")
        assert not errors, "\n".join(errors)
        return [
            None if number in expect_dead else answers[number].result
            for number in range(self.world_size)
        ]

    def _leave(self) -> list[str]:
        """Ends the ranks by closing their pipes; returns what kept any from ending."""
        for rank in self.ranks:
            rank.pipe.close()
        deadline = time.monotonic() + EXIT_S
        for rank in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank in self.ranks if rank.process.poll() != 0]
        return [f"rank {rank.number}: {rank.how_it_ended()}" for rank in stuck]

    def _kill(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.wait()
            rank.pipe.close()
        self.ranks = []
        if self.folder:
            self.folder.cleanup()
            self.folder = None


def try_on_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, env: Mapping[str, str], timeout_s: float
) -> tuple[str, list[Any]]:
    """Runs `fn(rank, world_size, *args)`: the whole error, or "", and each rank's result.

    For checks that report the error. It includes what the ranks wrote.
    """
    with captured_output() as output:
        try:
            with World(world_size, group_timeout_s=timeout_s / 2, env=env) as world:
                return "", world.run(fn, *args, timeout_s=timeout_s)
        except (AssertionError, OSError) as error:  # from World: what happened on each rank
            output.seek(0)
            return f"{error}\n{output.read()}".strip() or repr(error), []


def first_error(text: str) -> str:
    """The first line that names an exception, or the first line that has text."""
    found = _ERROR_LINE.search(text)
    return reason(found[0] if found else text)


@contextlib.contextmanager
def captured_output() -> Iterator[IO[str]]:
    """Captures what this process and its children write, native code included (gloo logs)."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        saved = [os.dup(fd) for fd in (1, 2)]
        try:
            for fd in (1, 2):
                os.dup2(output.fileno(), fd)
            yield output
        finally:
            for fd, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, fd)
                os.close(copy)
