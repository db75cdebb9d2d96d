"""Ranks that end themselves, or stand still, at one place of their way through the ring."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zcomm.transport.shared_memory.ring import Counter, Ring

Act = Callable[[], object]
# Before or after a step of a chunk.
PLACES = ("before publish", "after publish", "after reduce", "after collect")


def die(note: Path) -> None:
    """As if killed from outside. The note has the time of it, on a clock that all ranks share."""
    note.write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def at(place: str, count: int, act: Act) -> None:
    """This process acts at a place, when it comes there for the n-th time."""
    when, step = place.split()
    name = "publish" if step == "publish" else "done"
    counter = {"reduce": Counter.REDUCED, "collect": Counter.COLLECTED}.get(step)
    original = getattr(Ring, name)
    left = [count]

    def watched(ring: Ring, *args: Any) -> None:
        here = counter in (None, args[0])
        left[0] -= here
        if here and left[0] == 0 and when == "before":
            act()
        original(ring, *args)
        if here and left[0] == 0 and when == "after":
            act()

    setattr(Ring, name, watched)
