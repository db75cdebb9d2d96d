"""Inbox: jobs on their way from the callers' threads to the engine's."""

import queue
import threading
from typing import NamedTuple

from zcomm.engine.job import Job, Marker


class Stopped(RuntimeError):
    """The engine was told to stop."""


def stopped() -> Stopped:
    return Stopped("zcomm: the engine was stopped; its hook cannot be used any more")


class Failed(NamedTuple):
    """A job that failed in its caller's thread: the engine fails with it."""

    job: Job
    error: BaseException


class Inbox:
    """What was submitted, and what the engine's thread has taken and not finished."""

    def __init__(self) -> None:
        self._submitted: queue.SimpleQueue[Job | Marker | Failed | None] = queue.SimpleQueue()
        self._put = self._finished = 0  # each is written by one side only
        self._changed = threading.Event()
        self.stopping = False
        self.unfinished: list[Job | Marker] = []  # touched by the engine's thread only

    def put(self, job: Job | Marker | Failed | None) -> None:
        """None: stop."""
        self.stopping |= job is None
        self._put += job is not None
        self._submitted.put(job)
        self._changed.set()

    def empty(self) -> bool:
        return self._submitted.empty()

    def idle(self) -> bool:
        """Whether all that was submitted is finished."""
        return self._put == self._finished and not self.stopping

    def wait(self, timeout_s: float) -> None:
        """Until something is submitted, or the time is up."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def take(self) -> Job | Marker:
        """The next job; waits for it."""
        job = self._submitted.get()
        if job is None:
            raise stopped()
        if isinstance(job, Failed):
            self.unfinished.append(job.job)
            raise job.error
        self.unfinished.append(job)
        return job

    def finish(self, job: Job | Marker) -> None:
        self._finished += 1
        job.complete()  # if it raises, the job is among those that fail
        self.unfinished.remove(job)

    def drain(self) -> list[Job | Marker]:
        """Everything that is not finished."""
        left = list(self.unfinished)
        while not self._submitted.empty():
            job = self._submitted.get()
            left += filter(None, [job.job if isinstance(job, Failed) else job])
        return left
