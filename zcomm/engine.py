"""The engine: one thread that takes chunk after chunk through their steps.

While one chunk is on the network, the thread encodes and decodes others, and backward goes on. Each
hop has a process group of its own and takes chunks in the order of submission, so all ranks issue
the same collectives in the same order, whatever their timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from zcomm.job import Flight, Job
from zcomm.job_thread import SLOTS, JobThread
from zcomm.steps import Exchange, Steps
from zcomm.transport import Transport


class Engine(JobThread):
    """For tensors on the CPU, where a call returns when the work is done."""

    def __init__(self, transport: Transport, threads: int | None = None) -> None:
        # A new thread would ask torch for its own count, which is not the user's.
        threads = threads or torch.get_num_threads()
        super().__init__(transport, Steps(transport.rank, transport.world_size, threads))
        # From here on only the thread's.
        self._jobs: deque[Job] = deque()  # not wholly started
        self._reducing: deque[Flight] = deque()
        self._gathering: deque[Flight] = deque()
        self._free = list(self._slots)
        self._begin()

    def _serve(self) -> None:
        while True:
            while not self._submitted.empty():
                self._take()
            step = self._next_step()
            if step is not None:
                step()
            elif self._unfinished:
                self._wait()
            else:
                self._take()

    def _take(self) -> None:
        job = self._taken()
        assert isinstance(job, Job)
        self._jobs.append(job)

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

    def _wait(self) -> None:
        """Until there is something to do.

        It asks, it is not told: a callback of torch runs in a thread of gloo's, and one that comes
        when the interpreter is on its way out ends the process with an abort. (Nor does it wait
        for submissions: SimpleQueue.get with a short timeout may wait for ever in Python 3.11.)
        """
        with self.counters.time("wait_s", "wait"):
            self._wait_until(
                lambda: not self._submitted.empty() or self._next_step() is not None, self._rest
            )

    def _rest(self) -> None:
        under_way = (self._reducing or self._gathering or [self._jobs[0].check])[0]
        assert under_way is not None
        self._rest_on(under_way.work)

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

    def _chunk_done(self, flight: Flight) -> None:
        self._free.append(flight.slot)
        flight.job.decoded += 1
        if flight.job.decoded == len(flight.job.chunks):
            self._finish(flight.job)

    def _oldest(self) -> str:
        flights = [*self._gathering, *self._reducing]
        return str(flights[0]) if flights else f"{self._unfinished[0].what}, its start"


__all__ = ["SLOTS", "Engine"]
