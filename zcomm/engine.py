"""The engine: one thread that takes chunk after chunk through their steps.

While one chunk is on the network, the thread encodes and decodes others, and backward goes on. Each
hop has a process group of its own and takes chunks in the order of submission, so all ranks issue
the same collectives in the same order, whatever their timing.

Before its first chunk, a job exchanges a hash of what it is: ranks that disagree get an error that
says so, and no byte of one is ever read as that of another.
"""

from __future__ import annotations

import atexit
import hashlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from time import perf_counter

import torch

from zcomm.job import Check, Flight, Job, Slot
from zcomm.steps import Exchange, Range, Steps
from zcomm.transport import Channel, Transport

# Chunks under way: one is encoded while others are on the network, in either hop.
SLOTS = 4
# How long a waiting engine does not look up, and how often it asks whether a peer has failed.
_REST = timedelta(milliseconds=2)
_PEER_POLL_S = 0.5
# What a chunk under way may take until the thread looks up.
_STOP_S = 10.0


class _Stopped(RuntimeError):
    """The engine was told to stop."""


class Engine:
    """Runs jobs in the order of their submission, which must be the same on all ranks."""

    def __init__(self, transport: Transport, threads: int | None = None) -> None:
        self.transport = transport
        self.failure: BaseException | None = None
        # A new thread would ask torch for its own count, which is not the user's.
        threads = threads or torch.get_num_threads()
        self._steps = Steps(transport.rank, transport.world_size, threads)
        self.counters = self._steps.counters
        self._submitted: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # None: stop
        self._lock = threading.Lock()
        # From here on only the thread's.
        self._jobs: deque[Job] = deque()  # not wholly started
        self._unfinished: list[Job] = []
        self._reducing: deque[Flight] = deque()
        self._gathering: deque[Flight] = deque()
        self._slots = [Slot() for _ in range(SLOTS)]
        self._free = list(self._slots)
        self._thread = threading.Thread(target=self._run, name="zcomm-engine", daemon=True)
        self._thread.start()
        _running.add(self)

    def submit(self, job: Job) -> None:
        """Starts a job; one submitted after a failure completes at once, with that failure."""
        with self._lock:
            if self.failure is None:
                self._submitted.put(job)
                return
        job.fail(self.failure)

    def stop(self) -> None:
        """Ends the thread. Jobs under way complete with an error."""
        self._submitted.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)

    def buffer_nbytes(self) -> int:
        """Memory that the engine holds, apart from residuals."""
        return sum(slot.nbytes() for slot in self._slots) + self._steps.buffer_nbytes()

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while True:
                while not self._submitted.empty():
                    self._take(self._submitted.get())
                step = self._next_step()
                if step is not None:
                    step()
                elif self._unfinished:
                    self._wait()
                else:
                    self._take(self._submitted.get())
        except _Stopped as error:
            self._fail(error.with_traceback(None))  # a frame in it would keep the engine alive
        except BaseException as error:
            self._fail(error)

    def _take(self, job: Job | None) -> None:
        if job is None:
            raise _Stopped("zcomm: the engine was stopped; its hook cannot be used any more")
        self._jobs.append(job)
        self._unfinished.append(job)

    def _next_step(self) -> Callable[[], None] | None:
        """What can be done now, the most urgent first; None if all is on the network."""
        if self._reducing and self._arrived(self._reducing[0]):
            return self._sum
        if self._jobs and self._can_start(self._jobs[0]):
            return self._start
        if self._gathering and self._arrived(self._gathering[0]):
            return self._decode
        return None

    def _can_start(self, job: Job) -> bool:
        """A job's check can always start; its chunks when it is done, as there are free slots."""
        if job.check is None:
            return True
        return (bool(self._free) or not job.chunks) and self._arrived(job.check)

    def _arrived(self, under_way: Flight | Check) -> bool:
        """Whether it has; raises if it failed."""
        work = under_way.work
        assert work is not None
        if not work.is_completed():
            return False
        try:
            work.wait()
        except RuntimeError as error:
            raise self.transport.failure(str(under_way), error) from error
        return True

    def _wait(self) -> None:
        """Until there is something to do; looks for peers that failed.

        It asks, it is not told: a callback of torch runs in a thread of gloo's, and one that comes
        when the interpreter is on its way out ends the process with an abort. (Nor does it wait
        for submissions: SimpleQueue.get with a short timeout may wait for ever in Python 3.11.)
        """
        started, polled = perf_counter(), 0.0
        with self.counters.time("wait_s", "wait"):
            while self._submitted.empty() and self._next_step() is None:
                waited = perf_counter() - started
                if waited > polled + _PEER_POLL_S:
                    polled = waited
                    if self.transport.peer_failed():
                        raise self.transport.failure(self._oldest())
                self._rest()

    def _rest(self) -> None:
        """Until a collective has completed, or a little while has passed. It sleeps in native code:
        looking again and again cost more of the processor than a fast codec does."""
        under_way = (self._reducing or self._gathering or [self._jobs[0].check])[0]
        assert under_way is not None
        assert under_way.work is not None
        work = under_way.work
        with suppress(RuntimeError):  # a failure, too: the next look at it raises that
            work.wait(_REST)

    # The steps of a job.

    def _start(self) -> None:
        """The check of the oldest job; then its next chunk, up to its first hop."""
        job = self._jobs[0]
        if job.check is None:
            self._start_check(job)
            return
        if job.started == 0:
            self._compare(job)
        if job.chunks:
            self._start_chunk(job)
        if job.started == len(job.chunks):
            self._jobs.popleft()
        if not job.chunks:
            self._finish(job)

    def _start_chunk(self, job: Job) -> None:
        flight = Flight(job, job.started, self._free.pop(), "reduce-scatter")
        flight.slot.reserve(flight.chunk, job.reduce)
        job.started += 1
        if job.reduce:
            self._issue(self.transport.reduce, self._steps.encode(flight), flight)
            self._reducing.append(flight)
        else:
            self._start_gather(flight, self._steps.encode_source(flight))

    def _sum(self) -> None:
        flight = self._reducing.popleft()
        shard = self._steps.total(flight)
        if flight.job.gather:
            self._start_gather(flight, self._steps.encode_own(flight, shard))
        else:
            self._chunk_done(flight)

    def _start_gather(self, flight: Flight, exchange: Exchange) -> None:
        flight.hop = "all-gather"
        self._issue(self.transport.gather, exchange, flight)
        self._gathering.append(flight)

    def _decode(self) -> None:
        flight = self._gathering.popleft()
        self._steps.decode(flight)
        self._chunk_done(flight)

    def _issue(self, channel: Channel, exchange: Exchange, flight: Flight) -> None:
        self.counters.wire_bytes += exchange.send.numel()
        with Range("zcomm::send"):  # until it is on its way
            flight.work = channel.all_to_all(*exchange)

    def _chunk_done(self, flight: Flight) -> None:
        self._free.append(flight.slot)
        flight.job.decoded += 1
        if flight.job.decoded == len(flight.job.chunks):
            self._finish(flight.job)

    def _finish(self, job: Job) -> None:
        job.complete()
        self._unfinished.remove(job)

    # The check in front of a job.

    def _start_check(self, job: Job) -> None:
        digest = hashlib.blake2b(job.signature.encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "little", signed=True)
        mine = torch.full((self.transport.world_size,), value)
        everyone, ones = torch.empty_like(mine), [1] * mine.numel()
        work = self.transport.reduce.all_to_all(everyone, mine, ones, ones)
        job.check = Check(job.what, mine, everyone, work)

    def _compare(self, job: Job) -> None:
        assert job.check is not None
        if not torch.equal(job.check.mine, job.check.everyone):
            raise self.transport.disagreement(job.signature)

    # Failures.

    def _oldest(self) -> str:
        flights = [*self._gathering, *self._reducing]
        return str(flights[0]) if flights else f"{self._unfinished[0].what}, its start"

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


_running: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that comes back from native code while Python is on its way out would abort."""
    for engine in list(_running):
        engine.stop()
