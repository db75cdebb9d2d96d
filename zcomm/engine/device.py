"""The engine of a device whose work is asynchronous: it issues, and nobody waits.

The thread enqueues the steps of a chunk on the side stream, and the hops on the group's own. Events
put them in order, so the thread is done with a job long before the device is:

    the gradient's events     before     the job's first encode
    encode                    before     its hop            (the group sees to that)
    a hop                     before     what reads it, and before its slot is used again
    the job's last decode     before     what the user's stream does with the result

The order in which chunks are issued is fixed (`schedule`), and each job is issued to its end before
the next one begins. So all ranks issue the same collectives in one order, whatever their timing,
and one group serves both hops.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter, sleep

from torch import Tensor

from zcomm.engine.faults import Faults, Findings
from zcomm.engine.job import Flight, Job, Settling
from zcomm.engine.job_thread import SLOTS, JobThread
from zcomm.engine.steps import Steps
from zcomm.engine.streams import Event, Streams
from zcomm.transport.channels import Transport

# A chunk's slot is free again when it has come to its end: how many are started before that.
_END_LAG = SLOTS - 1
# How often the thread looks at what the device is doing, if nothing else wakes it.
_LOOK_S = 0.02
_SOON_S = 0.0005


def schedule(count: int, legs: int) -> Iterator[tuple[int, int]]:
    """The legs of a job's chunks, and their end (leg number `legs`), in the order in which all
    ranks issue them. While a chunk is on one leg, the next ones get ready; where there are more
    legs than slots, nothing is done during the first: that is the one inside of a host."""
    lags = [leg * _END_LAG // legs for leg in range(legs + 1)]
    for i in range(count + _END_LAG):
        for leg, lag in enumerate(lags):
            if 0 <= i - lag < count:
                yield leg, i - lag


class _Issued:
    """A job that the device is working on, or will be."""

    def __init__(
        self, what: str, ready: Sequence[Event], done: Event, findings: list[Findings]
    ) -> None:
        self.what, self.done, self.findings = what, done, findings
        self._ready = ready
        self._since: float | None = None

    def seconds(self) -> float:
        """Since its gradient was seen to be there; 0 before."""
        if self._since is None and all(event.query() for event in self._ready):
            self._since = perf_counter()
        return 0.0 if self._since is None else perf_counter() - self._since


class DeviceEngine(JobThread):
    """Completes a job when it has been issued; waiting for it makes the current stream follow."""

    def __init__(self, transport: Transport, streams: Streams, threads: int | None = None) -> None:
        with streams.side():
            self._faults = Faults(streams)
        super().__init__(
            transport,
            Steps(transport.rank, threads, streams.device, self._faults),
        )
        self._streams = streams
        self._wake = threading.Event()
        # From here on only the thread's.
        self._issued: deque[_Issued] = deque()
        self._begin()

    def submit(self, job: Job | Settling) -> None:
        if isinstance(job, Job):
            job.ready, job.streams = self._streams.ready(), self._streams
        super().submit(job)

    def settle(self) -> None:
        settling = Settling()
        self.submit(settling)
        settling.wait()

    def keep(self, t: Tensor) -> None:
        self._streams.keep(t)

    def _put(self, job: Job | Settling | None) -> None:
        super()._put(job)
        self._wake.set()

    def _serve(self) -> None:
        while True:
            if not self._all_seen() and self._submitted.empty():
                self._wait_until(
                    lambda: not self._submitted.empty() or self._all_seen(), self._doze
                )
            else:
                self._take()

    def _take(self) -> None:
        job = self._taken()
        if isinstance(job, Job):
            self._run_job(job)
        else:
            self._wait_until(self._all_seen, lambda: sleep(_SOON_S))
            self._finish(job)

    def _doze(self) -> None:
        """Until something is submitted, or a little while has passed."""
        self._wake.wait(_LOOK_S)
        self._wake.clear()

    # Issuing.

    def _run_job(self, job: Job) -> None:
        self._agree(job)
        with self._streams.side():
            for event in job.ready:
                self._streams.wait(event)
            for t in (job.source, job.target):
                if t is not None:
                    self._streams.keep(t)
            self._issue_chunks(job)
            findings = self._faults.collect()
            job.done = self._streams.done()
            self._issued.append(_Issued(job.what, job.ready, job.done, findings))
            # Here, where the side stream is current: a future's result comes after all of this.
            self._finish(job)

    def _agree(self, job: Job) -> None:
        """The check, over the host's network: nothing has been issued yet if ranks disagree."""
        self._start_check(job)
        check = job.check
        assert check is not None
        with self.counters.time("wait_s", "wait"):
            self._wait_until(lambda: self._arrived(check), lambda: self._rest_on(check.work))
        self._compare(job)

    def _issue_chunks(self, job: Job) -> None:
        job.route = self._routes.of(job)
        legs = len(job.route.legs)
        flights: dict[int, Flight] = {}
        for leg, index in schedule(len(job.chunks), legs):
            if leg == 0:
                flights[index] = Flight(job, index, self._slots[index % SLOTS])
                flights[index].slot.reserve(flights[index].chunk, job.reduce)
            else:
                self._join(flights[index])
            if leg < legs:
                flights[index].leg = leg
                self._issue(flights[index])
            else:
                job.route.end(flights.pop(index))

    # Looking back.

    def _all_seen(self) -> bool:
        """Whether the device is done with all that was issued; raises what it found there."""
        while self._issued and self._issued[0].done.query():
            for findings in self._issued.popleft().findings:
                error = findings.error()
                if error is not None:
                    raise error
        if self._issued and self._issued[0].seconds() > self.transport.deadline_s:
            raise self.transport.failure(f"{self._issued[0].what}, on the device")
        return not self._issued

    def _oldest(self) -> str:
        if self._unfinished and isinstance(self._unfinished[0], Job):
            return f"{self._unfinished[0].what}, its start"
        return f"{self._issued[0].what}, on the device"
