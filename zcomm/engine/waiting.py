"""Waiting: for hops and for other ranks, without missing a rank that fails.

Before its first chunk a job exchanges a hash of what it is. Ranks that disagree get an error that
says so, and no rank ever reads bytes of one job as those of another.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter

import torch
from torch.distributed import Work

from zcomm.engine.inbox import stopped
from zcomm.engine.job import Job
from zcomm.engine.parcel import SIGNATURE_NBYTES, Parcels
from zcomm.engine.small import Small
from zcomm.engine.transit import Transit
from zcomm.transport.channels import Transport
from zcomm.transport.shared_memory.ring import Ring, RingError, State
from zcomm.wire.header import WireError

# How long a caller waits by itself for a small job. Signals, such as that of Ctrl-C, wait as long.
PATIENCE = timedelta(milliseconds=20)
# How long a waiting engine sleeps at a time, and how often it asks whether a peer has failed.
_REST = timedelta(milliseconds=2)
_PEER_POLL_S = 0.5


@dataclass(eq=False)
class Check:
    """The exchange of parcels in front of a job. `small`: the job itself, if it is in them."""

    job: Job
    work: Work
    sent_at: float
    small: Small | None = None

    def __str__(self) -> str:
        return f"{self.job.what}, before its first chunk"


def failure(
    transport: Transport, error: RuntimeError, job: Job, where: str, waited_s: float
) -> Exception:
    """What users see of an error of a hop."""
    notes = transport.notes
    if not isinstance(error, RingError):
        return notes.failure(where, error, waited_s)
    rank = transport.ranks[error.rank]
    if error.state is State.INTERRUPTED:
        return stopped()
    if error.state is State.OTHER_JOB:
        return notes.disagreement(job.signature)
    if error.state is State.BROKEN:
        me = transport.ranks[transport.rank]
        return WireError(f"rank {me}: {where}: corrupted counter of rank {rank}: {error}", rank)
    return notes.failure(where, None, waited_s, rank if error.state is State.DIED else None)


class Waiting:
    """How one engine waits."""

    def __init__(self, transport: Transport, parcel_nbytes: int = SIGNATURE_NBYTES) -> None:
        self._transport = transport
        place = transport.rank, transport.world_size, parcel_nbytes
        self._mine, self._everyone = Parcels(*place), Parcels(*place)
        self._splits = [parcel_nbytes // SIGNATURE_NBYTES] * transport.world_size

    def arrived(self, sent: Transit | Check) -> bool:
        """Whether it has arrived; raises if it failed."""
        assert sent.work is not None
        if not sent.work.is_completed():
            return False
        self.join(sent)
        return True

    def has_free_slot(self, job: Job, rest: timedelta = timedelta(0)) -> bool:
        """Whether the ranks of this host have left the ring's next slot."""
        ring, where = self._transport.ring, f"{job.what}, its next chunk"
        assert isinstance(ring, Ring)
        try:
            return ring.has_free_slot(rest.total_seconds())
        except RingError as error:
            raise failure(self._transport, error, job, where, 0.0) from error

    def rest_on_slot(self, job: Job) -> None:
        """Sleeps until the slot is free, 2 ms at most."""
        self.has_free_slot(job, _REST)

    def join(self, sent: Transit | Check) -> None:
        """What comes next, on the current stream too, comes after it."""
        assert sent.work is not None
        try:
            sent.work.wait()
        except RuntimeError as error:
            waited_s = perf_counter() - sent.sent_at
            raise failure(self._transport, error, sent.job, str(sent), waited_s) from error

    def rest_on(self, sent: Transit | Check, rest: timedelta = _REST) -> None:
        """Sleeps until it has arrived, or the time is up. It sleeps in native code: a loop that
        looks again and again costs more processor time than a fast codec does."""
        assert sent.work is not None
        with suppress(RuntimeError):  # a failure: the next look at it raises that
            sent.work.wait(rest)

    def until(
        self, ready: Callable[[], bool], rest: Callable[[], object], oldest: Callable[[], str]
    ) -> None:
        """Rests until ready; raises when a peer has failed, naming the oldest work in flight."""
        started, polled = perf_counter(), 0.0
        while not ready():
            waited = perf_counter() - started
            if waited > polled + _PEER_POLL_S:
                polled = waited
                if self._transport.notes.peer_failed():
                    raise self._transport.notes.failure(oldest(), None, waited)
            rest()

    def start_check(self, job: Job, small: Small | None = None) -> Check:
        """Sends parcels. Only one check is under way at a time."""
        self._mine.sign(job.signature)
        if small is not None:
            small.put(self._mine)
        parcels = self._everyone.words, self._mine.words, self._splits, self._splits
        work = self._transport.signatures().all_to_all(*parcels)
        return Check(job, work, perf_counter(), small)

    def open(self, check: Check) -> None:
        """Raises on every rank if signatures differ; a small job has its result."""
        if not torch.equal(self._mine.signatures, self._everyone.signatures):
            raise self._transport.notes.disagreement(check.job.signature)
        if check.small is not None:
            check.small.take(self._everyone)
