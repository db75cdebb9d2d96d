"""Waiting: for hops and for other ranks, without missing a rank that fails.

Before its first chunk a job exchanges a hash of what it is. Ranks that disagree get an error that
says so, and no rank ever reads bytes of one job as those of another.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter

import torch
from torch.distributed import Work

from zcomm.engine.job import Job
from zcomm.engine.parcel import Parcels, ParcelSlot
from zcomm.engine.transit import Transit
from zcomm.transport.channels import Transport

# How long a waiting engine sleeps at a time, and how often it asks whether a peer has failed.
_REST = timedelta(milliseconds=2)
_PEER_POLL_S = 0.5


@dataclass(eq=False)
class Check:
    """The exchange of parcels in front of a job. `small`: the job itself, if it is in them."""

    job: Job
    mine: Parcels
    everyone: Parcels
    work: Work
    sent_at: float
    small: Transit | None = None

    def __str__(self) -> str:
        return f"{self.job.what}, before its first chunk"


def signature_number(signature: str) -> int:
    """What ranks compare: a hash of 64 bits."""
    return int.from_bytes(hashlib.blake2b(signature.encode(), digest_size=8).digest(), "little")


class Waiting:
    """How one engine waits."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def arrived(self, sent: Transit | Check) -> bool:
        """Whether it has arrived; raises if it failed."""
        assert sent.work is not None
        if not sent.work.is_completed():
            return False
        self.join(sent)
        return True

    def join(self, sent: Transit | Check) -> None:
        """What comes next, on the current stream too, comes after it."""
        assert sent.work is not None
        try:
            sent.work.wait()
        except RuntimeError as error:
            waited_s = perf_counter() - sent.sent_at
            raise self._transport.notes.failure(str(sent), error, waited_s) from error

    def rest_on(self, sent: Transit | Check) -> None:
        """Sleeps until it has arrived, 2 ms at most. It sleeps in native code: a loop that looks
        again and again costs more processor time than a fast codec does."""
        assert sent.work is not None
        with suppress(RuntimeError):  # a failure: the next look at it raises that
            sent.work.wait(_REST)

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

    def start_check(self, job: Job, small: Transit | None, room: int) -> Check:
        """Sends parcels of `room` bytes; a small job's frames are ready."""
        world_size = self._transport.world_size
        mine = Parcels.signed(world_size, signature_number(job.signature) - (1 << 63), room)
        if small is not None:
            assert isinstance(small.slot, ParcelSlot)
            small.slot.send(small.whole, mine, job.collective.reduce)
        everyone, sizes = Parcels(torch.empty_like(mine.rows)), [room] * world_size
        work = self._transport.signatures().all_to_all(
            everyone.rows.view(-1), mine.rows.view(-1), sizes, sizes
        )
        return Check(job, mine, everyone, work, perf_counter(), small)

    def compare(self, check: Check) -> None:
        """Raises on every rank if signatures differ."""
        if not torch.equal(check.mine.signatures(), check.everyone.signatures()):
            raise self._transport.notes.disagreement(check.job.signature)
        if check.small is not None:
            assert isinstance(check.small.slot, ParcelSlot)
            check.small.slot.arrive(check.everyone)
