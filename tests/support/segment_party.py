"""Ranks of one process that hand each other their segments, and what they leave behind."""

from __future__ import annotations

import mmap
import os
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zcomm.transport.shared_memory import PeerSegment, Segment
from zcomm.transport.shared_memory.meeting import Address, Meeting, listen

NBYTES = 1 << 16


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_segments() -> list[str]:
    """How each segment in the memory of this process is mapped, such as r--s."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(line.split()[1] for line in lines if "memfd:zcomm" in line)


def vm_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def left_names(addresses: dict[int, Address]) -> list[int]:
    """The ranks whose sockets' names still exist."""
    names = Path("/proc/net/unix").read_text()
    return [rank for rank, address in addresses.items() if address.name in names]


class Party:
    """Ranks of this process that are about to meet; strangers know their addresses."""

    def __init__(self, size: int, nbytes: int = NBYTES) -> None:
        self.nbytes = nbytes
        self.addresses = {r: Address.fresh() for r in range(size)}
        self.segments: list[Segment] = []
        self.peers: list[PeerSegment] = []
        self.threads = ThreadPoolExecutor(size)

    def prepare(self, rank: int, timeout_s: float = 5.0) -> Meeting:
        mine = Segment.create(self.nbytes)
        self.segments.append(mine)
        listener = listen(self.addresses[rank])
        return Meeting(rank, mine, listener, self.addresses, timeout_s)

    def start(self, rank: int, timeout_s: float = 5.0) -> Future[Any]:
        """Listens, then meets in a thread."""
        return self.threads.submit(self.prepare(rank, timeout_s).hold)

    def call(self, rank: int) -> socket.socket:
        """A connection to a rank, like that of a peer."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(5.0)
        try:
            connection.connect(self.addresses[rank].path)
        except BaseException:
            connection.close()
            raise
        return connection

    def greeting(self, rank: int) -> bytes:
        return self.addresses[rank].greeting(rank)

    def met(self, *meetings: Future[Any]) -> list[dict[int, PeerSegment]]:
        found = [meeting.result() for meeting in meetings]
        assert all(isinstance(peers, dict) for peers in found), found
        self.peers += [peer for peers in found for peer in peers.values()]
        return found

    def close(self) -> None:
        self.threads.shutdown()
        for one in (*self.segments, *self.peers):
            one.close()
