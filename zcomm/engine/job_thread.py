"""JobThread: what engines have in common: the thread, the check in front of a job, failures.

Before its first chunk, a job exchanges a hash of what it is: ranks that disagree get an error that
says so, and no byte of one is ever read as that of another.
"""

from __future__ import annotations

import atexit
import hashlib
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from time import perf_counter

import torch
from torch import Tensor

from zcomm.engine.buffers import Slot
from zcomm.engine.job import Check, Flight, Job, Settling
from zcomm.engine.routes import Routes
from zcomm.engine.steps import Steps
from zcomm.torch_private.profiler import Range
from zcomm.transport.channels import Transport, Work

# Chunks under way: one is encoded while others are on the network, in either hop.
SLOTS = 4
# How long a waiting engine does not look up, and how often it asks whether a peer has failed.
_REST = timedelta(milliseconds=2)
_PEER_POLL_S = 0.5
# What a chunk under way may take until the thread looks up.
_STOP_S = 10.0


class _Stopped(RuntimeError):
    """The engine was told to stop."""


class JobThread(ABC):
    """Runs jobs in the order of their submission, which must be the same on all ranks."""

    def __init__(self, transport: Transport, steps: Steps) -> None:
        self.transport = transport
        self.failure: BaseException | None = None
        self._steps = steps
        self._routes = Routes(steps, transport)
        self.counters = steps.counters
        self._slots = [Slot(steps.device) for _ in range(SLOTS)]
        self._submitted: queue.SimpleQueue[Job | Settling | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished: list[Job | Settling] = []  # only the thread's
        self._thread = threading.Thread(target=self._run, name="zcomm-engine", daemon=True)

    def _begin(self) -> None:
        """The last step of construction: the thread finds all that it needs."""
        self._thread.start()
        _running.add(self)

    def submit(self, job: Job | Settling) -> None:
        """Starts a job; one submitted after a failure completes at once, with that failure."""
        with self._lock:
            if self.failure is None:
                self._put(job)
                return
        job.fail(self.failure)

    def settle(self) -> None:
        """Until it is known how all jobs that have completed went. On the CPU it always is."""

    def keep(self, t: Tensor) -> None:
        """The memory is not given to others before the engine is done with it, whoever drops the
        tensor. On the CPU a job's own reference is enough."""

    def stop(self) -> None:
        """Ends the thread. Jobs under way complete with an error."""
        self._put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)

    def buffer_nbytes(self) -> int:
        """Memory that the engine holds, apart from residuals."""
        return sum(slot.nbytes() for slot in self._slots) + self._steps.buffer_nbytes()

    def _put(self, job: Job | Settling | None) -> None:
        self._submitted.put(job)  # None: stop

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            self._serve()
        except _Stopped as error:
            self._fail(error.with_traceback(None))  # a frame in it would keep the engine alive
        except BaseException as error:
            self._fail(error)

    @abstractmethod
    def _serve(self) -> None:
        """Takes jobs, until it is told to stop."""

    @abstractmethod
    def _oldest(self) -> str:
        """What has been under way for the longest time."""

    def _taken(self) -> Job | Settling:
        """What was submitted next; waits for it."""
        job = self._submitted.get()
        if job is None:
            raise _Stopped("zcomm: the engine was stopped; its hook cannot be used any more")
        self._unfinished.append(job)
        return job

    def _finish(self, job: Job | Settling) -> None:
        job.complete()
        self._unfinished.remove(job)

    def _issue(self, flight: Flight) -> None:
        """A flight's leg: makes its bytes ready, and sends them."""
        leg = flight.job.route.legs[flight.leg]
        exchange = leg.prepare(flight)  # may refuse what came over the hop before
        flight.hop = leg.hop
        self.counters.wire_bytes += exchange.send.numel()
        with Range("zcomm::send"):  # until it is on its way
            flight.work = leg.channel.all_to_all(*exchange)

    # Waiting.

    def _arrived(self, under_way: Flight | Check) -> bool:
        """Whether it has; raises if it failed."""
        assert under_way.work is not None
        if not under_way.work.is_completed():
            return False
        self._join(under_way)
        return True

    def _join(self, under_way: Flight | Check) -> None:
        """What is done next comes after it."""
        assert under_way.work is not None
        try:
            under_way.work.wait()
        except RuntimeError as error:
            raise self.transport.failure(str(under_way), error) from error

    def _wait_until(self, come: Callable[[], bool], rest: Callable[[], object]) -> None:
        """Rests until it has come; looks for peers that failed."""
        started, polled = perf_counter(), 0.0
        while not come():
            waited = perf_counter() - started
            if waited > polled + _PEER_POLL_S:
                polled = waited
                if self.transport.peer_failed():
                    raise self.transport.failure(self._oldest())
            rest()

    def _rest_on(self, work: Work | None) -> None:
        """Until a collective has completed, or a little while has passed. It sleeps in native code:
        looking again and again cost more of the processor than a fast codec does."""
        assert work is not None
        with suppress(RuntimeError):  # a failure, too: the next look at it raises that
            work.wait(_REST)

    # The check in front of a job.

    def _start_check(self, job: Job) -> None:
        digest = hashlib.blake2b(job.signature.encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "little", signed=True)
        mine = torch.full((self.transport.world_size,), value, device="cpu")
        everyone, ones = torch.empty_like(mine), [1] * mine.numel()
        work = self.transport.signatures().all_to_all(everyone, mine, ones, ones)
        job.check = Check(job.what, mine, everyone, work)

    def _compare(self, job: Job) -> None:
        assert job.check is not None
        if not torch.equal(job.check.mine, job.check.everyone):
            raise self.transport.disagreement(job.signature)

    # Failures.

    def _fail(self, error: BaseException) -> None:
        """Completes everything with the error and ends the groups; then the thread ends."""
        if not isinstance(error, _Stopped) or self._unfinished:
            # Where the store cannot be reached, the others find out at their deadline.
            with suppress(Exception):
                self.transport.report(f"{type(error).__name__}: {error}")
        with self._lock:
            self.failure = error
            left = list(self._unfinished)
            while not self._submitted.empty():
                left += filter(None, [self._submitted.get()])
        if left:
            self.transport.abandon()
        for job in left:
            job.fail(error)
        self.transport.release()


_running: weakref.WeakSet[JobThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that comes back from native code while Python is on its way out would abort."""
    for engine in list(_running):
        engine.stop()
