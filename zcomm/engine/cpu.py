"""The order of chunks on the CPU, where a call returns when its work is done.

While one chunk is on the network, the thread encodes and decodes others. Each hop has its own
process group and takes chunks in the order of submission, so all ranks issue the same collectives
in the same order, whatever their timing.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from zcomm.engine.buffers import AnySlot, Slot, TwoSlots
from zcomm.engine.inbox import Inbox, stopped
from zcomm.engine.job import Job, Marker
from zcomm.engine.parcel import parcel_nbytes
from zcomm.engine.pipeline import Pipeline
from zcomm.engine.small import small_of
from zcomm.engine.transit import Stage, Transit
from zcomm.engine.waiting import PATIENCE, Check, Waiting
from zcomm.transport.channels import Channel, Transport


@dataclass(eq=False)
class _Running:
    """A job, its check, and how many of its chunks have started and finished."""

    job: Job
    stages: tuple[Stage, ...]
    shares: bool  # its hops inside a host go through shared memory
    check: Check | None = None
    started: int = 0
    finished: int = 0


class CpuRunner:
    """Does whatever can be done next; sleeps when everything is on the network."""

    def __init__(self, transport: Transport, threads: int | None = None) -> None:
        # A new thread would ask torch for its own count, which is not the user's.
        self.pipeline = Pipeline(transport, threads or torch.get_num_threads())
        self._transport, self._world_size = transport, transport.world_size
        self._waiting = Waiting(transport, parcel_nbytes(transport.world_size))
        self._starting: deque[_Running] = deque()  # jobs with chunks left to start
        self._running: dict[Job, _Running] = {}
        # What is on each channel, in the order of the hops.
        self._in_flight: dict[Channel, deque[Transit]] = {c: deque() for c in transport.channels()}
        self._free = list(self.pipeline.slots)

    def serve(self, inbox: Inbox) -> None:
        """Runs jobs until it is told to stop."""
        while True:
            while not inbox.empty():
                self._accept(inbox.take())
            if self._step(inbox):
                continue
            if inbox.unfinished:
                self._wait(inbox, lambda: not inbox.empty())
            else:
                self._accept(inbox.take())

    @torch.inference_mode()
    def run_here(self, job: Job) -> bool:
        """Runs a small job in the caller's thread while the engine's has nothing to do: to change
        threads twice takes longer than such a job. If the other ranks are late, serve() must go on
        with it: here it could not be interrupted."""
        small = small_of(job, self._world_size, self.pipeline)
        if small is None:
            return False
        check = self._waiting.start_check(job, small)
        with self.pipeline.counters.time("wait_s", "wait"):
            self._waiting.rest_on(check, PATIENCE)
        if not self._waiting.arrived(check):
            job.begun = check
            return False
        self._waiting.open(check)
        return True

    def run(self, job: Job, inbox: Inbox) -> None:
        """Runs one job that was taken from the inbox, to its end."""
        self._accept(job)
        while job in self._running:
            if self._step(inbox):
                continue
            if inbox.stopping:
                raise stopped()
            self._wait(inbox, lambda: inbox.stopping)

    def _step(self, inbox: Inbox) -> bool:
        """In a frame of its own: a job that serve() still held would keep its model alive."""
        step = self._next_step(inbox)
        if step is not None:
            step()
        return step is not None

    def _accept(self, job: Job | Marker) -> None:
        assert isinstance(job, Job)
        shares = self.pipeline.shares(job)
        if not shares and job.chunks and job.chunks[0].hops is not None:
            self._transport.connect_late()
        running = self._running[job] = _Running(job, self.pipeline.stages(job), shares)
        running.check, job.begun = job.begun, None  # the check has the job, too
        self._starting.append(running)

    def _next_step(self, inbox: Inbox) -> Callable[[], None] | None:
        """What can be done now, the most urgent first; None if everything is on the network."""
        arrived = self._first_arrived(decoded=False)
        if arrived is not None:
            return partial(self._advance, arrived, inbox)
        if self._starting and self._can_start(self._starting[0]):
            return partial(self._start, self._starting[0], inbox)
        arrived = self._first_arrived(decoded=True)
        return None if arrived is None else partial(self._advance, arrived, inbox)

    def _first_arrived(self, decoded: bool) -> deque[Transit] | None:
        """The first channel whose oldest chunk has arrived, and is decoded for all next, or not.

        Nobody waits for that decoding: what other ranks wait for goes first.
        """
        for queue in self._in_flight.values():
            if queue and _is_decoded_next(queue[0]) == decoded and self._waiting.arrived(queue[0]):
                return queue
        return None

    def _can_start(self, running: _Running) -> bool:
        """A job's check can always start; its chunks after that, as slots become free."""
        if running.check is None:
            return True
        if not running.job.chunks or running.check.small is not None:
            return self._waiting.arrived(running.check)
        has_slot = bool(self._free) and self._waiting.arrived(running.check)
        if not has_slot or not self._has_turn(running):
            return False
        return not running.shares or self._waiting.has_free_slot(running.job)

    def _has_turn(self, running: _Running) -> bool:
        """Whether all chunks before it are on its first channel, or past it: an all-gather starts
        where an all-reduce before it may not have arrived yet."""
        first = running.stages[0].channel
        in_flight = chain.from_iterable(self._in_flight.values())
        return not any(transit.will_use(first) for transit in in_flight)

    def _wait(self, inbox: Inbox, interrupted: Callable[[], bool]) -> None:
        """Until there is something to do, here or elsewhere.

        It polls: a callback of torch runs in one of gloo's threads, and one that arrives while the
        interpreter shuts down aborts the process. (Nor does it wait for submissions:
        SimpleQueue.get with a short timeout can wait forever in Python 3.11.)
        """
        with self.pipeline.counters.time("wait_s", "wait"):
            self._waiting.until(
                lambda: interrupted() or self._next_step(inbox) is not None,
                self._rest,
                lambda: self._oldest(inbox),
            )

    def _rest(self) -> None:
        sent = next((queue[0] for queue in self._in_flight.values() if queue), None)
        first = self._starting[0] if self._starting else None
        if sent is None and first is not None and first.shares and first.started:
            self._waiting.rest_on_slot(first.job)
            return
        resting_on = sent or (first.check if first else None)
        assert resting_on is not None
        self._waiting.rest_on(resting_on)

    def _oldest(self, inbox: Inbox) -> str:
        transits = [queue[0] for queue in reversed(self._in_flight.values()) if queue]
        return str(transits[0]) if transits else f"{inbox.unfinished[0].what}, its start"

    # The steps of a job.

    def _start(self, running: _Running, inbox: Inbox) -> None:
        """The check of the oldest job; then its next chunk, up to its first hop."""
        job = running.job
        if running.check is None:
            small = small_of(job, self._world_size, self.pipeline)
            running.check = self._waiting.start_check(job, small)
            return
        if running.started == 0:
            self._waiting.open(running.check)
        if running.check.small is not None:
            self._starting.popleft()
            self._finish(running, inbox)
            return
        if job.chunks:
            self._start_chunk(running)
        if running.started == len(job.chunks):
            self._starting.popleft()
        if not job.chunks:
            self._finish(running, inbox)

    def _start_chunk(self, running: _Running) -> None:
        job = running.job
        chunk, slot = job.chunks[running.started], self._free.pop()
        taken: AnySlot = slot
        if running.shares:
            chunk, taken = chunk.coded, self.pipeline.take_shared(job, running.started, slot)
        slot.reserve(chunk, job.collective.reduce)
        transit = Transit(job, running.started, taken, running.stages)
        running.started += 1
        self._send(transit)

    def _send(self, transit: Transit) -> None:
        self.pipeline.send(transit)
        self._in_flight[transit.channel].append(transit)

    def _advance(self, arrived: deque[Transit], inbox: Inbox) -> None:
        """From one hop to the next, or to the end."""
        transit = arrived.popleft()
        if not transit.in_last_stage:
            transit.stage += 1
            self._send(transit)
            return
        self.pipeline.finish(transit)
        if isinstance(transit.slot, TwoSlots):
            self.pipeline.leave_shared(transit)
            self._free.append(transit.slot.between)
        elif isinstance(transit.slot, Slot):
            self._free.append(transit.slot)
        running = self._running[transit.job]
        running.finished += 1
        if running.finished == len(running.job.chunks):
            self._finish(running, inbox)

    def _finish(self, running: _Running, inbox: Inbox) -> None:
        del self._running[running.job]
        inbox.finish(running.job)


def _is_decoded_next(transit: Transit) -> bool:
    return transit.in_last_stage and transit.job.collective.gather
