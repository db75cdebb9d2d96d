"""Inbox: jobs on their way from the callers' threads to the engine's."""

import queue
import threading

from zcomm.engine.job import Job, Marker


class Stopped(RuntimeError):
    """The engine was told to stop."""


def stopped() -> Stopped:
    return Stopped("zcomm: the engine was stopped; its hook cannot be used any more")


class Inbox:
    """What was submitted, and what the engine's thread has taken and not finished."""

    def __init__(self) -> None:
        self._submitted: queue.SimpleQueue[Job | Marker | None] = queue.SimpleQueue()
        self._changed = threading.Event()
        self.stopping = False
        self.unfinished: list[Job | Marker] = []  # touched by the engine's thread only

    def put(self, job: Job | Marker | None) -> None:
        """None: stop."""
        self.stopping |= job is None
        self._submitted.put(job)
        self._changed.set()

    def empty(self) -> bool:
        return self._submitted.empty()

    def wait(self, timeout_s: float) -> None:
        """Until something is submitted, or the time is up."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def take(self) -> Job | Marker:
        """The next job; waits for it."""
        job = self._submitted.get()
        if job is None:
            raise stopped()
        self.unfinished.append(job)
        return job

    def finish(self, job: Job | Marker) -> None:
        job.complete()
        self.unfinished.remove(job)

    def drain(self) -> list[Job | Marker]:
        """Everything that is not finished."""
        left = list(self.unfinished)
        while not self._submitted.empty():
            left += filter(None, [self._submitted.get()])
        return left
