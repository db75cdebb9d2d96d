"""Jobs among the ranks of a host, which share memory.

A chunk is never sent: this rank encodes it into its own slot of the ring, and its peers decode it
from there. Three steps bring it through (csrc/shm/turns.h):

    publish   encode the tensor into this rank's slot         for each owner its frame
    reduce    sum this rank's frame of every slot, encode     the sum replaces its own frame
    collect   decode every owner's frame where it lies        the tensor

While chunk i is published, chunk i - 1 is reduced and chunk i - 2 collected, so a rank seldom waits
for what another has not finished. A reduce-scatter ends with the sum; an all-gather starts with the
encoding of what this rank owns. Native code takes whole jobs through these steps (plain.py,
coded.py); Turns does it for those that need Python at every chunk. A job whose chunks do not fit
into a slot goes over the channels, once the ranks have compared their calls in the ring.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import sched_getaffinity
from time import perf_counter

from zcomm.engine.buffers import SharedSlot
from zcomm.engine.coded import coded_of
from zcomm.engine.cpu import CpuRunner
from zcomm.engine.inbox import Inbox
from zcomm.engine.job import Job, signature_number
from zcomm.engine.native import End, Native
from zcomm.engine.pipeline import Pipeline
from zcomm.engine.plain import plain_of
from zcomm.engine.transit import Transit
from zcomm.engine.waiting import PATIENCE, failure
from zcomm.kernels import cpu
from zcomm.torch_private.autograd import Range
from zcomm.transport.channels import Transport
from zcomm.transport.shared_memory.ring import Counter, Ring, RingError, State

# How often a rank looks before it sleeps, if every rank has a processor and nothing else to do.
_SPINS = 2000


class HostRunner:
    """Runs jobs in the order of submission, each to its end."""

    def __init__(self, transport: Transport, threads: int | None = None) -> None:
        assert isinstance(transport.ring, Ring)
        self._ring, self._transport = transport.ring, transport
        self._channels = CpuRunner(transport, threads)
        self.pipeline = self._channels.pipeline
        self._may_spin = len(sched_getaffinity(0)) >= transport.world_size

    def serve(self, inbox: Inbox) -> None:
        """Runs jobs until it is told to stop."""
        while True:
            self._serve_one(inbox)

    def _serve_one(self, inbox: Inbox) -> None:
        """In a frame of its own: a job that serve() still held would keep its model alive."""
        job = inbox.take()
        assert isinstance(job, Job)
        if job.begun is None:
            job.started_at = perf_counter()
        if self._run(job):
            inbox.finish(job)
        else:
            self._transport.connect_late()
            self._channels.run(job, inbox)

    def _run(self, job: Job) -> bool:
        """False if it does not fit into the ring; then the ranks have only compared it."""
        native = self._native(job)
        if native is not None:
            self._finish(native, job, self._run_native(native, job, self._ring.deadline_s))
            return True
        fits = job.chunks.largest_nbytes <= self._ring.slot_nbytes
        turns = Turns(self._ring, self.pipeline, job, self._spins(job))
        with self._failures(job, lambda: str(turns)):
            turns.run() if fits else turns.meet()
        return fits

    def run_here(self, job: Job) -> bool:
        """Runs a job of one exchange in the caller's thread while the engine's has nothing to do:
        to change threads twice takes longer than such a job. If the other ranks are late, serve()
        must go on with it: here it could not be interrupted."""
        native = self._native(job)
        if native is None:
            return False
        job.started_at = perf_counter()
        end = self._run_native(native, job, PATIENCE.total_seconds(), brief=True)
        if end.seen is not None and end.seen[0] == State.NOT_YET:
            job.begun = end.begun
            return False
        self._finish(native, job, end)
        return True

    def _native(self, job: Job) -> Native | None:
        plain = plain_of(job)
        if plain is None and job.chunks.largest_nbytes <= self._ring.slot_nbytes:
            return coded_of(job)
        return plain

    def _spins(self, job: Job) -> int:
        return _SPINS if self._may_spin and job.awaited else 0

    def _run_native(self, native: Native, job: Job, timeout_s: float, brief: bool = False) -> End:
        signature, spins = signature_number(job.signature), self._spins(job)
        call = cpu.call(*job.collective, signature, timeout_s, spins, brief, job.begun)
        with self.pipeline.counters.exchange() as parts:
            end = native.run(self._ring.native, job, call, self.pipeline)
            parts.add(end.publish_s, end.reduce_s + end.collect_s)
        return end

    def _finish(self, native: Native, job: Job, end: End) -> None:
        place = native.place(job, end)
        with self._failures(job, lambda: place):
            self._ring.expect(end.seen)
        if end.refused is not None:
            raise self.pipeline.refused(place, job.chunks[end.chunk], *end.refused)
        self.pipeline.count_whole(job, native.sent_nbytes(job, end))

    @contextmanager
    def _failures(self, job: Job, where: Callable[[], str]) -> Iterator[None]:
        """Turns errors of the ring into those that users see."""
        try:
            yield
        except RingError as error:
            waited_s = perf_counter() - job.started_at
            raise failure(self._transport, error, job, where(), waited_s) from error


class Turns:
    """A job on its way through the ring, chunk by chunk."""

    def __init__(self, ring: Ring, pipeline: Pipeline, job: Job, spins: int) -> None:
        self._ring, self._pipeline, self._job, self._spins = ring, pipeline, job, spins
        self._signature = signature_number(job.signature)
        self._reduce, self._gather = job.collective
        self._transits: list[Transit] = []
        self._place = f"{job.what}, before its first chunk"

    def __str__(self) -> str:
        return self._place

    def run(self) -> None:
        count = len(self._job.chunks)
        lag = 2 if self._reduce and self._gather else 1
        for i in range(count + lag):
            if i < count:
                self._publish(i)
            if self._reduce and 1 <= i <= count:
                self._sum(self._transits[i - 1])
            if self._gather and i >= lag:
                self._collect(self._transits[i - lag])
        if not count:
            self.meet()

    def meet(self) -> None:
        """The ranks only compare signatures: a job of nothing, or one that goes elsewhere."""
        number = self._take()
        self._ring.publish(number, self._signature)
        self._wait(Counter.PUBLISHED, number)
        self._ring.done(Counter.REDUCED, number)
        self._ring.done(Counter.COLLECTED, number)

    def _publish(self, index: int) -> None:
        number = self._take()
        transit = Transit(self._job, index, SharedSlot(self._ring, number), ())
        self._transits.append(transit)
        if self._reduce:
            self._at(transit, "reduce-scatter")
            self._pipeline.encode(transit)
            self._pipeline.counters.add_shared(transit.chunk.others_nbytes)
        else:
            self._at(transit, "all-gather")
            self._pipeline.encode_owned(transit)
            self._share_own(transit)
        with Range("zcomm::send"):
            self._ring.publish(number, self._signature)
        if not self._reduce:
            self._ring.done(Counter.REDUCED, number)

    def _sum(self, transit: Transit) -> None:
        number = self._at(transit, "reduce-scatter")
        self._wait(Counter.PUBLISHED, number)
        if self._gather:
            self._pipeline.encode_sum(transit)
            self._share_own(transit)
        else:
            self._pipeline.sum(transit)
        self._ring.done(Counter.REDUCED, number)
        if not self._gather:
            self._ring.done(Counter.COLLECTED, number)

    def _collect(self, transit: Transit) -> None:
        number = self._at(transit, "all-gather")
        self._wait(Counter.REDUCED if self._reduce else Counter.PUBLISHED, number)
        self._pipeline.decode(transit)
        self._ring.done(Counter.COLLECTED, number)

    def _share_own(self, transit: Transit) -> None:
        self._pipeline.counters.add_shared(transit.chunk.rows_nbytes)

    def _at(self, transit: Transit, hop: str) -> int:
        """Notes where errors happen; returns the number of the chunk in the ring."""
        transit.hop = hop
        self._place = str(transit)
        assert isinstance(transit.slot, SharedSlot)
        return transit.slot.number

    def _take(self) -> int:
        with self._pipeline.counters.time("wait_s", "wait"):
            return self._ring.take(self._spins)

    def _wait(self, counter: Counter, number: int) -> None:
        with self._pipeline.counters.time("wait_s", "wait"):
            self._ring.wait(counter, number, self._spins)
