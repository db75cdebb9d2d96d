"""The engine: one thread that takes chunk after chunk through their steps.

While one chunk is on the network, the thread encodes and decodes others, and backward goes on. Each
hop has a process group of its own and takes chunks in the order of submission, so all ranks issue
the same collectives in the same order, whatever their timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import chain

import torch

from zcomm.engine.job import Flight, Job
from zcomm.engine.job_thread import SLOTS, JobThread
from zcomm.engine.steps import Steps
from zcomm.transport.channels import Channel, Transport


class Engine(JobThread):
    """For tensors on the CPU, where a call returns when the work is done."""

    def __init__(self, transport: Transport, threads: int | None = None) -> None:
        # A new thread would ask torch for its own count, which is not the user's.
        super().__init__(transport, Steps(transport.rank, threads or torch.get_num_threads()))
        # From here on only the thread's.
        self._jobs: deque[Job] = deque()  # not wholly started
        # What is on each channel, in the order of a route's legs.
        self._under_way: dict[Channel, deque[Flight]] = {c: deque() for c in transport.channels()}
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
        job.route = self._routes.of(job)
        self._jobs.append(job)

    def _next_step(self) -> Callable[[], None] | None:
        """What can be done now, the most urgent first; None if all is on the network."""
        arrived = self._first_arrived(decoded=False)
        if arrived is not None:
            return partial(self._go_on, arrived)
        if self._jobs and self._can_start(self._jobs[0]):
            return self._start
        arrived = self._first_arrived(decoded=True)
        return None if arrived is None else partial(self._go_on, arrived)

    def _first_arrived(self, decoded: bool) -> deque[Flight] | None:
        """The first channel whose oldest flight has arrived, and is now decoded for all, or not."""
        for flights in self._under_way.values():
            if flights and _is_decoded_next(flights[0]) == decoded and self._arrived(flights[0]):
                return flights
        return None

    def _can_start(self, job: Job) -> bool:
        """A job's check can always start; its chunks when it is done, as there are free slots."""
        if job.check is None:
            return True
        if not job.chunks:
            return self._arrived(job.check)
        return bool(self._free) and self._arrived(job.check) and self._has_turn(job)

    def _has_turn(self, job: Job) -> bool:
        """Whether all flights before it are on its first channel, or past it: an all-gather starts
        where an all-reduce before it may have still to come to."""
        first = job.route.legs[0].channel
        flights = chain.from_iterable(self._under_way.values())
        return not any(first in f.job.route.channels_after(f.leg) for f in flights)

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
        under_way = next((flights[0] for flights in self._under_way.values() if flights), None)
        resting_on = under_way or self._jobs[0].check
        assert resting_on is not None
        self._rest_on(resting_on.work)

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
        flight = Flight(job, job.started, self._free.pop())
        flight.slot.reserve(flight.chunk, job.reduce)
        job.started += 1
        self._send(flight)

    def _send(self, flight: Flight) -> None:
        self._issue(flight)
        self._under_way[flight.job.route.legs[flight.leg].channel].append(flight)

    def _go_on(self, arrived: deque[Flight]) -> None:
        """From one leg to the next, or to the end."""
        flight = arrived.popleft()
        if flight.on_last_leg:
            flight.job.route.end(flight)
            self._chunk_done(flight)
        else:
            flight.leg += 1
            self._send(flight)

    def _chunk_done(self, flight: Flight) -> None:
        self._free.append(flight.slot)
        flight.job.done_chunks += 1
        if flight.job.done_chunks == len(flight.job.chunks):
            self._finish(flight.job)

    def _oldest(self) -> str:
        flights = [queue[0] for queue in reversed(self._under_way.values()) if queue]
        return str(flights[0]) if flights else f"{self._unfinished[0].what}, its start"


def _is_decoded_next(flight: Flight) -> bool:
    """Nobody waits for that: what others wait for goes first."""
    return flight.on_last_leg and flight.job.gather


__all__ = ["SLOTS", "Engine"]
