"""gloo's threads at the end of a process: torch's own abort, and how zcomm keeps out of it.

A thread of gloo lets go of a collective's tensors a little after it has reported the result, and
needs the GIL for that. If the interpreter begins to shut down just then, CPython ends the thread in
the middle of a C++ destructor, and C++ ends the process: "terminate called without an active
exception", exit code 134. torchrun then restarts a job that had finished. destroy_process_group()
does not help: a DDP model, even a deleted one, keeps the group and its threads (torch 2.13).
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

THREAD = "(pt_gloo_runloop)"
IDLE = "S"


def let_gloo_finish(timeout_s: float = 5.0) -> None:
    """Waits, without the GIL, until gloo's threads sleep.

    They must be seen asleep twice: the first time, one of them may have been waiting for the GIL.
    """
    deadline = time.monotonic() + timeout_s
    seen = 0
    while seen < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
        seen = seen + 1 if all(state == IDLE for state in _states()) else 0


def _states() -> Iterator[str]:
    """What each thread of gloo is doing; none on systems without /proc."""
    for task in Path("/proc/self/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            _, found, state = task.read_text().partition(THREAD)
            if found:
                yield state.split()[0]
