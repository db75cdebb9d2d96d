"""Shared memory for all ranks of a host, or for none of them."""

import os
import socket
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from typing import NamedTuple

import torch.distributed as dist

from zcomm.base.host import this_host
from zcomm.transport.handshake import Caller
from zcomm.transport.shared_memory.meeting import Address, Meeting, listen
from zcomm.transport.shared_memory.segment import NoSharedMemory, PeerSegment, Segment

# How long ranks that have all announced themselves may take to connect.
_MEET_S = 20.0
_MOST_REASONS = 3
ALONE = NoSharedMemory("no other rank of the group is on its host")


class SharedMemory(NamedTuple):
    """This rank's segment, and those of the group's other ranks on its host."""

    segment: Segment
    peers: dict[int, PeerSegment]

    def close(self) -> None:
        """Unmaps everything; a second call does nothing."""
        self.segment.close()
        _close(self.peers.values())


class _Ready(NamedTuple):
    segment: Segment
    listener: socket.socket
    address: Address


class _Said(NamedTuple):
    """What a rank tells all others before they connect."""

    host: str
    name: str
    token: str
    problem: str


def share(nbytes: int, caller: Caller, problem: str = "") -> SharedMemory | NoSharedMemory:
    """Gives each rank a segment of `nbytes`, which the other ranks of its host map.

    All ranks of the group call it, with the same size. If one rank of a host cannot, or has a
    `problem` of its own, all of that host get the reason. It raises only what the handshake raises:
    a rank did not come.
    """
    rank = dist.get_rank(caller.group)
    with ExitStack() as undo:
        mine = NoSharedMemory(problem) if problem else _ready(nbytes, undo)
        said = [_Said(*one) for one in caller.gather_json(_said(mine))]
        if max(Counter(one.host for one in said).values()) == 1:
            return ALONE
        mates = {r: one for r, one in enumerate(said) if one.host == said[rank].host}
        met = _met(rank, mine, mates, min(_MEET_S, caller.timeout_s / 2))
        if isinstance(met, dict):
            undo.callback(_close, met.values())
        verdicts = caller.gather_json("" if isinstance(met, dict) else met.reason)
        reasons = [f"rank {r}: {verdicts[r]}" for r in mates if verdicts[r]]
        if isinstance(mine, NoSharedMemory) or isinstance(met, NoSharedMemory) or reasons:
            return NoSharedMemory("; ".join(reasons[:_MOST_REASONS]))
        undo.pop_all()
        return SharedMemory(mine.segment, met)


def _ready(nbytes: int, undo: ExitStack) -> _Ready | NoSharedMemory:
    """Has a segment and listens."""
    if sys.platform != "linux":
        return NoSharedMemory(f"expected Linux, got {sys.platform}")
    if os.environ.get("ZCOMM_SHM") == "0":
        return NoSharedMemory("ZCOMM_SHM=0 turns shared memory off")
    address = Address.fresh()
    try:
        segment = Segment.create(nbytes)
        undo.callback(segment.close)
        listener = listen(address)
        undo.callback(listener.close)
    except OSError as error:
        return NoSharedMemory(f"cannot share {nbytes} bytes of memory: {error.strerror}")
    return _Ready(segment, listener, address)


def _said(mine: _Ready | NoSharedMemory) -> _Said:
    host = this_host().dumps()
    if isinstance(mine, NoSharedMemory):
        return _Said(host, "", "", mine.reason)
    return _Said(host, *mine.address, problem="")


def _met(
    rank: int, mine: _Ready | NoSharedMemory, mates: dict[int, _Said], timeout_s: float
) -> dict[int, PeerSegment] | NoSharedMemory:
    """The peers of this rank, or its own reason for having none."""
    if isinstance(mine, NoSharedMemory):
        return mine
    if len(mates) == 1:
        return ALONE
    if any(mate.problem for mate in mates.values()):
        return {}  # those who have a problem give the reason
    addresses = {r: Address(mate.name, mate.token) for r, mate in mates.items()}
    return Meeting(rank, mine.segment, mine.listener, addresses, timeout_s).hold()


def _close(peers: Iterable[PeerSegment]) -> None:
    for peer in peers:
        peer.close()
