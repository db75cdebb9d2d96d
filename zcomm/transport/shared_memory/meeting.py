"""How the ranks of a host hand each other their segments.

Each pair has one connection, on which the higher rank calls the lower one:

    caller                               listener
    token, rank                    →     checks the uid and the token
    checks the token, and maps it  ←     token, rank, segment
    token, rank, segment           →     checks the token, and maps it

No rank waits for one peer while another one speaks, so they can come in any order, and a stranger
who says nothing holds nobody up. Segments travel only while all ranks receive, because the kernel
limits the descriptors that a user has in flight (RLIMIT_NOFILE): with 128 ranks it may take turns.
"""

import array
import errno
import hmac
import os
import secrets
import select
import socket
import struct
from contextlib import suppress
from time import monotonic, sleep
from typing import NamedTuple

from zcomm.transport.shared_memory.segment import (
    NoSharedMemory,
    PeerSegment,
    Segment,
    credentials,
    map_theirs,
)

_GREETING = struct.Struct("<16sI")  # the sender's token, and its rank
_BACKLOG = 256
_RETRY_S = 0.005
_MOST_REASONS = 3


class Address(NamedTuple):
    """Where a rank listens, and the token that proves who it is."""

    name: str
    token: str

    @staticmethod
    def fresh() -> "Address":
        return Address(secrets.token_hex(16), secrets.token_hex(16))

    @property
    def path(self) -> str:
        """In the abstract namespace: no file, and gone with the socket."""
        return f"\0zcomm-{self.name}"

    def greeting(self, rank: int) -> bytes:
        return _GREETING.pack(bytes.fromhex(self.token), rank)


def listen(address: Address) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address.path)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


class _Link:
    """A connection to a peer, or to a stranger."""

    def __init__(self, connection: socket.socket, rank: int | None) -> None:
        self.connection = connection
        self.rank = rank  # once it is known: of a rank that was called, or has shown its token
        self.owed = False  # whether the peer has yet to get our segment
        self.peer: PeerSegment | None = None

    def close(self) -> None:
        (self.peer or self.connection).close()


class Meeting:
    """One rank's side of it.

    `addresses` has all ranks of the host, this one too, and all of them listen by now. The meeting
    closes the listening socket.
    """

    def __init__(
        self,
        rank: int,
        segment: Segment,
        listener: socket.socket,
        addresses: dict[int, Address],
        timeout_s: float,
    ) -> None:
        self._rank, self._segment, self._listener = rank, segment, listener
        self._addresses, self._timeout_s = addresses, timeout_s
        self._deadline = monotonic() + timeout_s
        self._awaited = addresses.keys() - {rank}
        self._peers: dict[int, PeerSegment] = {}
        self._links: dict[int, _Link] = {}
        self._failures: list[str] = []
        self._refusals: list[str] = []

    def hold(self) -> dict[int, PeerSegment] | NoSharedMemory:
        """The segments of all peers, or why one is not here."""
        try:
            self._exchange()
        except OSError as error:
            self._failures.append(f"cannot meet the ranks of this host: {error.strerror}")
        finally:
            self._listener.close()
            for link in self._links.values():
                link.close()
        if not (self._failures or self._awaited):
            return self._peers
        for peer in self._peers.values():
            peer.close()
        return NoSharedMemory(self._reason())

    def _exchange(self) -> None:
        """Until every peer has come or failed, or time is up."""
        for rank in sorted(self._awaited):
            if rank < self._rank:
                self._call(rank)
        while self._awaited and (left_s := self._deadline - monotonic()) > 0:
            for fd in self._ready(left_s):
                if fd == self._listener.fileno():
                    self._accept()
                else:
                    self._hear(self._links[fd])
            for link in [link for link in self._links.values() if link.owed]:
                self._hand_over(link)

    def _reason(self) -> str:
        late = f"no segment of ranks {sorted(self._awaited)} in {self._timeout_s:g} s"
        found = [*self._failures, *([late] if self._awaited else []), *self._refusals]
        return "; ".join(found[:_MOST_REASONS])

    def _call(self, rank: int) -> None:
        link = _Link(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), rank)
        self._links[link.connection.fileno()] = link
        try:
            _connect(link.connection, self._addresses[rank].path, self._deadline)
            if stranger := _stranger(link.connection):
                self._drop(link, stranger)
            else:
                self._say(link, [])
        except OSError as error:
            self._drop(link, f"cannot be reached: {error.strerror}")

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            link = self._links[connection.fileno()] = _Link(connection, None)
            if stranger := _stranger(connection):
                self._drop(link, stranger)

    def _ready(self, left_s: float) -> list[int]:
        poll = select.poll()
        for fd in (self._listener.fileno(), *self._links):
            poll.register(fd, select.POLLIN)
        owing = any(link.owed for link in self._links.values())
        wait_s = min(left_s, _RETRY_S) if owing else left_s
        return [fd for fd, _ in poll.poll(1000 * wait_s)]

    def _hear(self, link: _Link) -> None:
        """Takes one message. Descriptors that came with it are closed: a mapping needs none."""
        said, fds, problem = _receive(link.connection)
        try:
            problem = problem or self._unproven(link, said) or self._take(link, said, fds)
        finally:
            for fd in fds:
                os.close(fd)
        if problem:
            self._drop(link, problem)
        else:
            self._settle(link)

    def _unproven(self, link: _Link, said: bytes) -> str:
        """Why a message does not come from a peer that is expected here; empty if it does."""
        if len(said) != _GREETING.size:
            got = f"{len(said)} bytes" if said else "the end of the connection"
            return f"expected a greeting of {_GREETING.size} bytes, got {got}"
        _, rank = _GREETING.unpack(said)
        known = self._addresses.get(rank)
        if known is None or not hmac.compare_digest(said, known.greeting(rank)):
            return "expected a rank of this host and its token, got others"
        here = {other.rank for other in self._links.values()}
        calling = link.rank is None and rank > self._rank and rank in self._awaited - here
        return "" if calling or rank == link.rank else f"expected another rank, got rank {rank}"

    def _take(self, link: _Link, said: bytes, fds: list[int]) -> str:
        """Why a message is refused; empty if not. A caller's first one has no segment."""
        expected = 0 if link.rank is None else 1
        if len(fds) != expected or link.peer is not None:
            return f"expected a message with {expected} descriptors, once, got one with {len(fds)}"
        if link.rank is None:
            _, link.rank = _GREETING.unpack(said)
            link.owed = True
            return ""
        mapped = map_theirs(fds[0], self._segment.nbytes, link.connection)
        if isinstance(mapped, NoSharedMemory):
            return mapped.reason
        link.peer = mapped
        link.owed |= link.rank < self._rank
        return ""

    def _hand_over(self, link: _Link) -> None:
        try:
            self._say(link, [self._segment.fd])
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # else too many are in flight: again later
                self._drop(link, f"cannot be sent a segment: {error.strerror}")
            return
        link.owed = False
        self._settle(link)

    def _say(self, link: _Link, fds: list[int]) -> None:
        """sendmsg, because send_fds ignores flags: here, that nobody gets a SIGPIPE."""
        segment = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        greeting = self._addresses[self._rank].greeting(self._rank)
        link.connection.sendmsg([greeting], segment, socket.MSG_NOSIGNAL)

    def _settle(self, link: _Link) -> None:
        """A peer has come once each side has the other's segment."""
        if link.rank is not None and link.peer is not None and not link.owed:
            del self._links[link.connection.fileno()]
            self._awaited.remove(link.rank)
            self._peers[link.rank] = link.peer

    def _drop(self, link: _Link, problem: str) -> None:
        """Ends a connection. If it was a stranger's, the peer may still come."""
        del self._links[link.connection.fileno()]
        link.close()
        if link.rank is None:
            if len(self._refusals) < _MOST_REASONS:
                self._refusals.append(f"refused a connection: {problem}")
        else:
            self._awaited.remove(link.rank)
            self._failures.append(f"rank {link.rank}: {problem}")


def _connect(connection: socket.socket, path: str, deadline: float) -> None:
    connection.setblocking(False)
    while True:
        try:
            return connection.connect(path)
        except BlockingIOError:  # too many wait to be accepted
            if monotonic() > deadline:
                raise
            sleep(_RETRY_S)


def _stranger(connection: socket.socket) -> str:
    """Who is at the other end, if it is another user's process."""
    me, uid = os.geteuid(), credentials(connection)[1]
    return "" if uid == me else f"expected a process of uid {me}, got one of uid {uid}"


def _receive(connection: socket.socket) -> tuple[bytes, list[int], str]:
    """A message, its descriptors, and what went wrong.

    recvmsg, because recv_fds ignores flags: here, that a program this process runs gets none.
    """
    fds = array.array("i")
    room = socket.CMSG_SPACE(2 * fds.itemsize)  # the kernel closes those that do not fit
    try:
        said, extra, flags, _ = connection.recvmsg(
            _GREETING.size + 1, room, socket.MSG_CMSG_CLOEXEC
        )
    except OSError as error:
        return b"", [], f"the connection failed: {error.strerror}"
    for level, kind, data in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    cut = "expected one descriptor, got more, or too many are open (ulimit -n)"
    return said, fds.tolist(), cut if flags & socket.MSG_CTRUNC else ""
