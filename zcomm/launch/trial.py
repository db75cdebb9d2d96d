"""A trial: ranks that may fail, with their output captured, for checks that report the error."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from zcomm.launch.ranks import World
from zcomm.report.finding import reason

_ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b.*", re.MULTILINE)


def try_on_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, env: Mapping[str, str], timeout_s: float
) -> tuple[str, list[Any]]:
    """Runs `fn(rank, world_size, *args)`: the whole error, or "", and each rank's result."""
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
