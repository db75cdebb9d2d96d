"""The order of chunks on a device whose work is asynchronous: the thread enqueues, nobody waits.

Encodes and decodes go to the side stream, hops to the group's own. Events put them in order, so the
thread is done with a job long before the device is:

    the gradient's events     before     the job's first encode
    encode                    before     its hop            (the group sees to that)
    a hop                     before     what reads it, and before its slot is used again
    the job's last decode     before     what the user's stream does with the result

The order in which chunks are enqueued is fixed (`schedule`), and each job is enqueued to its end
before the next one starts. So all ranks issue the same collectives in one order, whatever their
timing, and one group serves both hops.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter, sleep

from zcomm.engine.faults import Faults, Findings
from zcomm.engine.inbox import Inbox
from zcomm.engine.job import Job
from zcomm.engine.pipeline import SLOTS, Pipeline
from zcomm.engine.streams import Event, Streams
from zcomm.engine.transit import Transit
from zcomm.engine.waiting import Waiting
from zcomm.transport.channels import Transport

# A chunk's slot is free again when the chunk is done: how many start before that.
_END_LAG = SLOTS - 1
# How often the thread looks at what the device is doing, if nothing else wakes it.
_LOOK_S = 0.02
_SOON_S = 0.0005


def schedule(count: int, stages: int) -> Iterator[tuple[int, int]]:
    """The stages of a job's chunks, and their end (stage number `stages`), in the order in which
    all ranks enqueue them. While a chunk is in one stage, the next ones get ready. With more stages
    than slots nothing overlaps the first: that is the hop inside a host."""
    lags = [stage * _END_LAG // stages for stage in range(stages + 1)]
    for i in range(count + _END_LAG):
        for stage, lag in enumerate(lags):
            if 0 <= i - lag < count:
                yield stage, i - lag


class _Enqueued:
    """A job that the device is working on, or will be."""

    def __init__(
        self, what: str, ready: Sequence[Event], done: Event, findings: list[Findings]
    ) -> None:
        self.what, self.done, self.findings = what, done, findings
        self._ready = ready
        self._since: float | None = None

    def seconds(self) -> float:
        """Since its gradient was seen to be ready; 0 before."""
        if self._since is None and all(event.query() for event in self._ready):
            self._since = perf_counter()
        return 0.0 if self._since is None else perf_counter() - self._since


class DeviceRunner:
    """Completes a job when all of it is enqueued; waiting for it makes the current stream wait."""

    def __init__(self, transport: Transport, streams: Streams, threads: int | None = None) -> None:
        with streams.side():
            self._faults = Faults(streams)
        self.pipeline = Pipeline(transport, threads, streams.device, self._faults)
        self._transport, self._streams = transport, streams
        self._waiting = Waiting(transport)
        self._enqueued: deque[_Enqueued] = deque()

    def serve(self, inbox: Inbox) -> None:
        """Runs jobs until it is told to stop."""
        while True:
            if not self._all_seen() and inbox.empty():
                self._waiting.until(
                    lambda: not inbox.empty() or self._all_seen(),
                    lambda: inbox.wait(_LOOK_S),
                    self._oldest,
                )
            else:
                self._take(inbox)

    def _take(self, inbox: Inbox) -> None:
        """In a frame of its own: a job that serve() still held would keep its model alive."""
        job = inbox.take()
        if isinstance(job, Job):
            self._run_job(job, inbox)
        else:
            self._waiting.until(self._all_seen, lambda: sleep(_SOON_S), self._oldest)
            inbox.finish(job)

    # Enqueuing.

    def _run_job(self, job: Job, inbox: Inbox) -> None:
        self._agree(job)
        with self._streams.side():
            for event in job.ready:
                self._streams.wait(event)
            for t in job.data.tensors():
                self._streams.record_stream(t)
            self._enqueue_chunks(job)
            findings = self._faults.collect()
            job.done = self._streams.done()
            self._enqueued.append(_Enqueued(job.what, job.ready, job.done, findings))
            # Here, while the side stream is current: a future's result comes after all of this.
            inbox.finish(job)

    def _agree(self, job: Job) -> None:
        """The check, over the host's network: nothing is enqueued yet if ranks disagree."""
        check = self._waiting.start_check(job)
        with self.pipeline.counters.time("wait_s", "wait"):
            self._waiting.until(
                lambda: self._waiting.arrived(check),
                lambda: self._waiting.rest_on(check),
                lambda: f"{job.what}, its start",
            )
        self._waiting.open(check)

    def _enqueue_chunks(self, job: Job) -> None:
        stages = self.pipeline.stages(job)
        transits: dict[int, Transit] = {}
        for stage, index in schedule(len(job.chunks), len(stages)):
            if stage == 0:
                slot = self.pipeline.slots[index % SLOTS]
                transits[index] = Transit(job, index, slot, stages)
                slot.reserve(job.chunks[index], job.collective.reduce)
            else:
                self._waiting.join(transits[index])
            if stage < len(stages):
                transits[index].stage = stage
                self.pipeline.send(transits[index])
            else:
                self.pipeline.finish(transits.pop(index))

    # Looking back.

    def _all_seen(self) -> bool:
        """Whether the device has finished everything; raises what it found."""
        while self._enqueued and self._enqueued[0].done.query():
            for findings in self._enqueued.popleft().findings:
                error = findings.error()
                if error is not None:
                    raise error
        waited_s = self._enqueued[0].seconds() if self._enqueued else 0.0
        if waited_s > self._transport.deadline_s:
            raise self._transport.notes.failure(self._oldest(), None, waited_s)
        return not self._enqueued

    def _oldest(self) -> str:
        return f"{self._enqueued[0].what}, on the device"
