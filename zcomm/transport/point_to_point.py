"""Tensors from one rank to another, over the user's group, with a deadline.

One rank, the hub, sends to all others or receives from them, one after the other. So a rank may
wait for the hub, which waits for a rank that has died. A rank whose time is over says in the store
whom it waits for, and follows what others say there: at the end of the line is the culprit.
"""

from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zcomm.transport.failure_notes import CommunicationError
from zcomm.transport.handshake import Caller
from zcomm.transport.store import Store, StoreError, in_short

# How long a rank looks for what the others wait for, at most.
_GRACE_S = 2.5
_POLL_S = 0.05


class PointToPoint:
    """Sends and receives of one call of all ranks, in which they have met and agreed on a name.

    Each takes at most the caller's timeout_s. With NCCL that is so once two ranks are connected,
    and depends on torch; else the group's own timeout decides.
    """

    def __init__(self, caller: Caller, name: str, hub: int) -> None:
        self._what, self._group = caller.what, caller.group
        self._name, self.hub = name, hub
        self._grace_s = min(_GRACE_S, caller.timeout_s / 4)
        self._timeout = timedelta(seconds=caller.timeout_s - self._grace_s)

    def send(self, t: Tensor, to: int) -> None:
        """Ranks are those of the group."""
        self._run(lambda: dist.isend(t, group=self._group, group_dst=to), to)

    def recv(self, t: Tensor, sender: int) -> None:
        self._run(lambda: dist.irecv(t, group=self._group, group_src=sender), sender)

    def _run(self, start: Callable[[], Any], peer: int) -> None:
        started = monotonic()
        try:
            start().wait(self._timeout)
        except RuntimeError as error:  # its time is over, or the connection is closed
            raise self._failure(peer, error, started) from error

    def _failure(self, peer: int, error: RuntimeError, started: float) -> CommunicationError:
        try:
            culprit = Store(self._name).answer(
                lambda store: self._culprit(store, peer), self._grace_s
            )
        except StoreError:
            culprit = peer
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        me, where = f"rank {dist.get_rank()}", f"{self._what} [{in_short(error)}]"
        if culprit is None:
            return CommunicationError(
                f"{me}: all ranks are alive, but this did not finish: {where}"
            )
        perhaps = ", or waits for a rank that did," if culprit == self.hub else ""
        return CommunicationError(
            f"{me}: rank {ranks[culprit]} died or stopped (no answer for "
            f"{monotonic() - started:.0f} s){perhaps} in {where}"
        )

    def _culprit(self, store: Any, peer: int) -> int | None:
        """The rank at the end of the line; None if those in it wait for each other."""
        line = [dist.get_rank(self._group), peer]
        store.set(f"waits/{line[0]}", str(peer))
        deadline = monotonic() + 0.8 * self._grace_s  # the rest is for the store's answers
        while monotonic() < deadline:
            if not store.check([f"waits/{line[-1]}"]):
                sleep(_POLL_S)
                continue
            line.append(int(store.get(f"waits/{line[-1]}")))
            if line[-1] in line[:-1]:
                return None
        return line[-1]
