"""The engine: one thread that encodes, sends, sums and decodes, chunk after chunk.

A chunk of an all-reduce goes through these steps, in two buffers, `wire` and `rows`:

    encode      the flat tensor           -> wire: a frame for each owner
    first hop   the others' frames        -> rows: this rank's frame from each of them
    decode_sum  rows and its own frame    -> shard, summed in rank order
    encode      the shard                 -> wire (its own frame), copied to rows for the others
    second hop  rows                      -> wire: every owner's frame
    decode      wire                      -> the flat tensor

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter, sleep

import torch
from torch import Tensor

from zcomm.feedback import ChunkFeedback
from zcomm.plan import Chunk
from zcomm.transport import Channel, CommunicationError, Transport, Work
from zcomm.wire import WireError

# Chunks under way: one is encoded while others are on the network, in either hop.
_SLOTS = 4
# How often a waiting engine looks at its collectives, and asks whether a peer has failed.
_LEAST_DELAY_S, _MOST_DELAY_S = 20e-6, 0.5e-3
_PEER_POLL_S = 0.5
# What a chunk under way may take until the thread looks up.
_STOP_S = 10.0


@dataclass
class Counters:
    """Totals since the engine started."""

    raw_bytes: int = 0
    wire_bytes: int = 0
    encode_s: float = 0.0
    wait_s: float = 0.0
    decode_s: float = 0.0


class Job:
    """A flat tensor on its way.

    `source` is encoded, `target` receives; they may be the same memory. With `reduce` the ranks'
    sources are summed, with `gather` every rank receives all of it; one or both.
    """

    def __init__(
        self,
        what: str,
        chunks: Sequence[Chunk],
        source: Tensor,
        target: Tensor,
        *,
        reduce: bool,
        gather: bool,
        prescale: float = 1.0,
        verify: bool = True,
        feedback: Sequence[ChunkFeedback] | None = None,
        signature: str = "",
        finish: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        self.what, self.chunks = what, chunks
        self.source, self.target = source, target
        self.reduce, self.gather = reduce, gather
        self.prescale, self.verify, self.feedback = prescale, verify, feedback
        self.signature = signature
        self.finish = finish
        self.error: BaseException | None = None
        self.started = self.decoded = 0  # chunks
        self.check: _Check | None = None
        self._completed = threading.Event()

    def complete(self, error: BaseException | None) -> None:
        """Tells who waits; `finish` is called first, with the error if there is one."""
        self.error = error
        if self.finish is not None:
            self.finish(error)
        self._completed.set()

    def completed(self) -> bool:
        return self._completed.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has completed, with or without an error, before the timeout."""
        return self._completed.wait(timeout_s)


@dataclass
class _Check:
    """The exchange of signatures in front of a job."""

    what: str
    mine: Tensor
    everyone: Tensor
    work: Work

    def __str__(self) -> str:
        return f"{self.what}, comparison of signatures"


class _Slot:
    """The two buffers of one chunk under way. They grow to the largest chunk and stay."""

    def __init__(self) -> None:
        self.wire = self.rows = torch.empty(0, dtype=torch.uint8)

    def reserve(self, wire_nbytes: int, rows_nbytes: int) -> None:
        self.wire, self.rows = _grown(self.wire, wire_nbytes), _grown(self.rows, rows_nbytes)

    def nbytes(self) -> int:
        return self.wire.nbytes + self.rows.nbytes


@dataclass
class _Flight:
    """A chunk on the network."""

    job: Job
    index: int
    slot: _Slot
    hop: str
    work: Work | None = None

    @property
    def chunk(self) -> Chunk:
        return self.job.chunks[self.index]

    def __str__(self) -> str:
        count = len(self.job.chunks)
        return f"{self.job.what}, {self.hop} of chunk {self.index + 1} of {count}"


class _Stopped(RuntimeError):
    """The engine was told to stop."""


@dataclass
class _Pipeline:
    """All that is under way. Only the engine's thread touches it."""

    jobs: deque[Job] = field(default_factory=deque)  # not wholly started
    unfinished: list[Job] = field(default_factory=list)
    reducing: deque[_Flight] = field(default_factory=deque)
    gathering: deque[_Flight] = field(default_factory=deque)
    free: list[_Slot] = field(default_factory=lambda: [_Slot() for _ in range(_SLOTS)])


class Engine:
    """Runs jobs in the order of their submission, which must be the same on all ranks."""

    def __init__(self, transport: Transport, threads: int | None = None) -> None:
        self.transport = transport
        self.counters = Counters()
        self.failure: BaseException | None = None
        # A new thread would ask torch for its own count, which is not the user's.
        self._threads = threads or torch.get_num_threads()
        self._submitted: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # None: stop
        self._lock = threading.Lock()
        self._reported = False
        self._pipeline = _Pipeline()
        self._slots = tuple(self._pipeline.free)
        self._shard = self._stage = torch.empty(0, dtype=torch.uint8)
        self._thread = threading.Thread(target=self._run, name="zcomm-engine", daemon=True)
        self._thread.start()
        _running.add(self)

    def submit(self, job: Job) -> None:
        """Starts a job; one submitted after a failure completes at once, with that failure."""
        with self._lock:
            if self.failure is None:
                self._submitted.put(job)
                return
        job.complete(self.failure)

    def stop(self) -> None:
        """Ends the thread. Jobs under way complete with an error."""
        self._submitted.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)

    def buffer_nbytes(self) -> int:
        """Memory that the engine holds, apart from residuals."""
        return sum(s.nbytes() for s in self._slots) + self._shard.nbytes + self._stage.nbytes

    # The thread.

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while True:
                self._wait()
                while self._advance():
                    while not self._submitted.empty():
                        self._take(self._submitted.get())
        except BaseException as error:
            self._fail(error)

    def _take(self, job: Job | None) -> None:
        if job is None:
            raise _Stopped("zcomm: the engine was stopped; its hook cannot be used any more")
        self._pipeline.jobs.append(job)
        self._pipeline.unfinished.append(job)

    def _wait(self) -> None:
        """Until there is a job, or something has arrived; looks for peers that failed.

        It asks, it is not told: a callback of torch runs in a thread of gloo's, and one that comes
        when the interpreter is on its way out ends the process with an abort.
        """
        if not self._pipeline.unfinished:
            self._take(self._submitted.get())
            return
        started, polled = perf_counter(), 0.0
        try:
            while not self._something_arrived():
                waited = perf_counter() - started
                if waited > polled + _PEER_POLL_S:
                    polled = waited
                    if self.transport.peer_failed():
                        raise self._communication_error(self._oldest(), None)
                # A tenth of the wait so far: seldom late by more, and hardly ever awake.
                # (SimpleQueue.get with a short timeout may wait for ever in Python 3.11.)
                sleep(min(max(waited / 10, _LEAST_DELAY_S), _MOST_DELAY_S))
                if not self._submitted.empty():
                    self._take(self._submitted.get())
                    return
        finally:
            self.counters.wait_s += perf_counter() - started

    def _something_arrived(self) -> bool:
        p = self._pipeline
        heads = [*islice(p.reducing, 1), *islice(p.gathering, 1)]
        check = p.jobs[0].check if p.jobs else None
        return any(self._arrived(x) for x in heads) or (check is not None and self._arrived(check))

    def _arrived(self, under_way: _Flight | _Check) -> bool:
        """Whether it has; raises if it failed."""
        work = under_way.work
        assert work is not None
        if not work.is_completed():
            return False
        try:
            work.wait()
        except RuntimeError as error:
            raise self._communication_error(str(under_way), error) from error
        return True

    def _advance(self) -> bool:
        """Does one thing that can be done now, the most urgent first; False if there is none."""
        pipeline = self._pipeline
        if pipeline.reducing and self._arrived(pipeline.reducing[0]):
            self._sum(pipeline.reducing.popleft())
        elif pipeline.jobs and self._can_start(pipeline.jobs[0]):
            self._start(pipeline.jobs[0])
        elif pipeline.gathering and self._arrived(pipeline.gathering[0]):
            self._decode(pipeline.gathering.popleft())
        else:
            return False
        return True

    def _can_start(self, job: Job) -> bool:
        if job.check is None:
            return True
        return self._arrived(job.check) and (bool(self._pipeline.free) or not job.chunks)

    def _start(self, job: Job) -> None:
        """The check first; then the next chunk's encoding and its first hop."""
        if job.check is None:
            self._start_check(job)
            return
        if job.started == 0:
            self._compare(job)
        if job.chunks:
            flight = _Flight(job, job.started, self._pipeline.free.pop(), "reduce-scatter")
            job.started += 1
            self._encode(flight)
        if job.started == len(job.chunks):
            self._pipeline.jobs.popleft()
        if not job.chunks:
            self._finish(job)

    def _encode(self, flight: _Flight) -> None:
        job, chunk, slot = flight.job, flight.chunk, flight.slot
        slot.reserve(chunk.wire.wire_nbytes, chunk.rows_nbytes)
        self.counters.raw_bytes += self._raw_bytes(job, chunk)
        if not job.reduce:
            stop = chunk.shard_offset + chunk.own.numel
            self._encode_own(flight, job.source[chunk.shard_offset : stop], job.prescale)
            return
        started = perf_counter()
        hop = job.feedback[flight.index].sent if job.feedback else None
        chunk.wire.encode(
            job.source,
            hop.residuals if hop else None,
            out=slot.wire[: chunk.wire.wire_nbytes],
            prescale=job.prescale,
            verify=job.verify,
            keep_idle=True,
            threads=self._threads,
        )
        if hop:
            hop.settle()
        self.counters.encode_s += perf_counter() - started
        self._pipeline.reducing.append(flight)
        others, rows = slot.wire[: chunk.others_nbytes], slot.rows[: chunk.rows_nbytes]
        splits = chunk.row_splits, chunk.frame_splits
        self._issue(self.transport.reduce, flight, rows, others, *splits)

    def _sum(self, flight: _Flight) -> None:
        """The sum of this rank's frames: the result, or what the second hop encodes."""
        job, chunk, slot = flight.job, flight.chunk, flight.slot
        started = perf_counter()
        rows, nbytes = slot.rows, chunk.own_nbytes
        frames = [rows[r * nbytes : (r + 1) * nbytes] for r in range(self.transport.world_size - 1)]
        frames.insert(self.transport.rank, self._own_frame(flight))
        direct = not job.gather and job.target.dtype is chunk.sum_dtype
        part = job.target[chunk.shard_offset : chunk.shard_offset + chunk.own.numel]
        shard = part if direct else self._shard_buffer(chunk)
        try:
            chunk.own.decode_sum(frames, out=shard, verify=job.verify, threads=self._threads)
        except WireError as error:
            raise self._wire_error(flight, error.wire_index, error) from error
        self.counters.decode_s += perf_counter() - started
        if job.gather:
            self._encode_own(flight, shard, 1.0)
            return
        if not direct:
            part.copy_(shard)
        self._chunk_done(flight)

    def _encode_own(self, flight: _Flight, shard: Tensor, prescale: float) -> None:
        """Encodes what this rank owns, for all ranks and for itself, and starts the second hop."""
        job, chunk, slot = flight.job, flight.chunk, flight.slot
        started = perf_counter()
        hop = job.feedback[flight.index].owned if job.feedback else None
        own = self._own_frame(flight)
        chunk.own.encode(
            shard,
            hop.residuals if hop else None,
            out=own,
            prescale=prescale,
            verify=job.verify,
            keep_idle=True,
            threads=self._threads,
        )
        if hop:
            hop.settle()
        self._rows(flight).copy_(own)
        self.counters.encode_s += perf_counter() - started
        flight.hop = "all-gather"
        self._pipeline.gathering.append(flight)
        others, rows = slot.wire[: chunk.others_nbytes], slot.rows[: chunk.rows_nbytes]
        splits = chunk.frame_splits, chunk.row_splits
        self._issue(self.transport.gather, flight, others, rows, *splits)

    def _decode(self, flight: _Flight) -> None:
        job, chunk = flight.job, flight.chunk
        started = perf_counter()
        wire = flight.slot.wire[: chunk.wire.wire_nbytes]
        try:
            if job.target.dtype is chunk.sum_dtype:
                chunk.wire.decode(wire, out=job.target, verify=job.verify, threads=self._threads)
            else:
                self._decode_staged(job, chunk, wire)
        except WireError as error:
            raise self._wire_error(flight, None, error) from error
        self.counters.decode_s += perf_counter() - started
        self._chunk_done(flight)

    def _decode_staged(self, job: Job, chunk: Chunk, wire: Tensor) -> None:
        """Kernels write fp32; a bf16 or fp16 target is filled from there."""
        self._stage = _grown(self._stage, chunk.numel * 4)
        stage = self._stage[: chunk.numel * 4].view(torch.float32)
        chunk.packed.decode(wire, out=stage, verify=job.verify, threads=self._threads)
        segments = chunk.wire.segments
        torch._foreach_copy_(
            [job.target[s.offset : s.offset + s.numel] for s in segments],
            list(torch.split(stage, [s.numel for s in segments])),
        )

    def _chunk_done(self, flight: _Flight) -> None:
        self._pipeline.free.append(flight.slot)
        flight.job.decoded += 1
        if flight.job.decoded == len(flight.job.chunks):
            self._finish(flight.job)

    def _finish(self, job: Job) -> None:
        job.complete(None)
        self._pipeline.unfinished.remove(job)

    def _issue(
        self,
        channel: Channel,
        flight: _Flight,
        out: Tensor,
        send: Tensor,
        out_splits: list[int],
        send_splits: list[int],
    ) -> None:
        self.counters.wire_bytes += send.numel()
        flight.work = channel.all_to_all(out, send, out_splits, send_splits)

    # Checks.

    def _start_check(self, job: Job) -> None:
        digest = hashlib.blake2b(job.signature.encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "little", signed=True)
        mine = torch.full((self.transport.world_size,), value)
        everyone, ones = torch.empty_like(mine), [1] * mine.numel()
        work = self.transport.reduce.all_to_all(everyone, mine, ones, ones)
        job.check = _Check(job.what, mine, everyone, work)

    def _compare(self, job: Job) -> None:
        assert job.check is not None
        if torch.equal(job.check.mine, job.check.everyone):
            return
        self._report(job.signature)
        signatures, _ = self.transport.reports()
        signatures[self.transport.rank] = job.signature
        values = "; ".join(f"rank {r}: {s}" for r, s in sorted(signatures.items()))
        raise ValueError(
            f"rank {self.transport.rank}: expected the same call on all ranks, got {values}"
        )

    # Failures.

    def _report(self, text: str) -> None:
        self._reported = True
        self.transport.report(text)

    def _oldest(self) -> str:
        p = self._pipeline
        flights = [*p.gathering, *p.reducing]
        return str(flights[0]) if flights else p.unfinished[0].what

    def _communication_error(self, what: str, error: BaseException | None) -> CommunicationError:
        """Names the ranks that failed or do not answer."""
        cause = f": {error}" if error else ""
        text = f"rank {self.transport.rank}: {what} failed{cause}"
        try:
            self._report(f"gave up in {what}")
            found, silent = self.transport.reports()
        except Exception as unreachable:
            return CommunicationError(
                f"{text}. Which rank failed is not known: the store does not answer "
                f"({unreachable}); the process that keeps it, mostly rank 0, may be dead"
            )
        failed = [f"rank {r}: {s}" for r, s in found.items() if not s.startswith("gave up")]
        if silent:
            names = ", ".join(f"rank {r}" for r in silent)
            failed.append(f"{names} did not answer: dead, stopped, or busy with something else")
        return CommunicationError(f"{text}. {'; '.join(failed) or 'All ranks are alive'}")

    def _wire_error(self, flight: _Flight, sender: int | None, error: WireError) -> WireError:
        if sender is None:
            sender = self._corrupt_sender(flight)
        return WireError(
            f"rank {self.transport.rank}: {flight}: corrupted wire from rank {sender}: {error}",
            sender,
        )

    def _corrupt_sender(self, flight: _Flight) -> int | None:
        """Which rank's frame is refused, one by one."""
        layout, rank = flight.chunk.wire, self.transport.rank
        frames = torch.split(flight.slot.wire[: layout.wire_nbytes], list(layout.frame_nbytes))
        others = [r for r in range(self.transport.world_size) if r != rank]
        for slot, sender in enumerate([*others, rank]):
            alone = layout.for_peer(slot)
            try:
                alone.decode(frames[slot], out=torch.empty(alone.span), verify=flight.job.verify)
            except WireError:
                return sender
        return None

    def _fail(self, error: BaseException) -> None:
        """Completes everything with the error; the thread ends afterwards."""
        idle = isinstance(error, _Stopped) and not self._pipeline.unfinished
        if not (idle or self._reported):
            # Where the store cannot be reached, the others find out at their deadline.
            with suppress(Exception):
                self._report(f"{type(error).__name__}: {error}")
        with self._lock:
            self.failure = error
            left = list(self._pipeline.unfinished)
            while not self._submitted.empty():
                left += filter(None, [self._submitted.get()])
        if left:
            self.transport.abandon()
        for job in left:
            job.complete(error)

    # Small parts.

    def _own_frame(self, flight: _Flight) -> Tensor:
        chunk = flight.chunk
        return flight.slot.wire[chunk.others_nbytes : chunk.wire.wire_nbytes]

    def _rows(self, flight: _Flight) -> Tensor:
        chunk = flight.chunk
        rows = flight.slot.rows[: chunk.rows_nbytes]
        return rows.view(self.transport.world_size - 1, chunk.own_nbytes)

    def _shard_buffer(self, chunk: Chunk) -> Tensor:
        nbytes = chunk.own.numel * chunk.sum_dtype.itemsize
        self._shard = _grown(self._shard, nbytes)
        return self._shard[:nbytes].view(chunk.sum_dtype)

    def _raw_bytes(self, job: Job, chunk: Chunk) -> int:
        """What the same collective would send without a codec, in the tensor's own dtype."""
        others = chunk.numel - chunk.own.numel if job.reduce else 0
        copies = chunk.own.numel * (self.transport.world_size - 1) if job.gather else 0
        return (others + copies) * job.target.element_size()


_running: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that comes back from native code while Python is on its way out would abort."""
    for engine in list(_running):
        engine.stop()


def _grown(buffer: Tensor, nbytes: int) -> Tensor:
    return buffer if buffer.numel() >= nbytes else torch.empty(nbytes, dtype=torch.uint8)
