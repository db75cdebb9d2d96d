"""A rank's segment, memory that it alone writes, and how its peers see it."""

import ctypes
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

# F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_FUTURE_WRITE; Python 3.11 lacks the last one.
_SEALS = 0x01 | 0x02 | 0x04 | 0x10
_MFD_NOEXEC_SEAL = 0x08  # from Linux 6.3 on; Python 3.11 lacks it
_SO_PEERPIDFD = 77  # from Linux 6.5 on; Python lacks it
_CREDENTIALS = struct.Struct("3i")
_MAP_FAILED = ctypes.c_void_p(-1).value

# Not the mmap module: it keeps a copy of the descriptor, and has no address of read-only memory.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class NoSharedMemory(NamedTuple):
    """There is none, and why. The ranks use their process groups instead."""

    reason: str


class _Mapped:
    """Mapped memory and its descriptors, until it is closed or forgotten."""

    def __init__(self) -> None:
        self.address = self.nbytes = 0
        self._releases: list[Callable[[], Any]] = []
        _open.add(self)

    def _own(self, release: Callable[..., Any], *args: int) -> None:
        once = weakref.finalize(self, release, *args)
        once.atexit = False  # a native thread may still use it while the process ends
        self._releases.append(once)

    def _map(self, fd: int, nbytes: int, protection: int) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        address = _libc.mmap(None, nbytes, protection, flags, fd, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._own(_libc.munmap, address, nbytes)
        self.address, self.nbytes = address, nbytes

    def close(self) -> None:
        """The address is 0 from then on. A second call does nothing."""
        self.address = 0
        for release in self._releases:
            release()


_open: "weakref.WeakSet[_Mapped]" = weakref.WeakSet()


def _close_inherited() -> None:
    for mapped in list(_open):
        mapped.close()


os.register_at_fork(after_in_child=_close_inherited)


class Segment(_Mapped):
    """This rank's own memory, zero at first. Peers get `fd`."""

    @staticmethod
    def create(nbytes: int) -> "Segment":
        """Takes all of its memory at once, so ask for megabytes: if there is too little, the kernel
        kills processes. Raises OSError if the system has no memfds."""
        return Segment(_memfd(), nbytes)

    def __init__(self, fd: int, nbytes: int) -> None:
        super().__init__()
        self.fd = fd
        self._own(os.close, fd)
        # All pages now, so that no later write is a SIGBUS for want of memory.
        os.posix_fallocate(fd, 0, nbytes)
        self._map(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("zcomm", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what an older kernel says to a flag it does not know
            raise
        return os.memfd_create("zcomm", flags)


class PeerSegment(_Mapped):
    """A peer's memory, read-only, and whether the peer's process lives.

    `life_fd` is readable once it does not: a pidfd, or else the connection, on which a peer that
    lives says nothing. The connection is kept either way, because the peer may watch it.
    """

    def __init__(self, fd: int, nbytes: int, connection: socket.socket) -> None:
        self._connection = connection
        super().__init__()
        self._map(fd, nbytes, mmap.PROT_READ)
        pidfd = _pidfd(connection)
        self.has_pidfd = pidfd is not None
        self.life_fd = connection.fileno() if pidfd is None else pidfd
        if pidfd is not None:
            self._own(os.close, pidfd)

    def alive(self) -> bool:
        """A stopped process is alive. Once this is closed, nobody is."""
        if not self.address:
            return False
        poll = select.poll()
        poll.register(self.life_fd, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        super().close()
        self._connection.close()


def map_theirs(fd: int, nbytes: int, connection: socket.socket) -> PeerSegment | NoSharedMemory:
    """Maps a descriptor that a peer sent, if nobody can rewrite it or cut it short."""
    try:
        # Seals first: only files in memory have them, and fstat may block on others.
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if seals & _SEALS != _SEALS:
            return NoSharedMemory(f"expected a segment with seals {_SEALS:#x}, got {seals:#x}")
        size = os.fstat(fd).st_size
        if size != nbytes:
            return NoSharedMemory(f"expected a segment of {nbytes} bytes, got {size}")
        return PeerSegment(fd, nbytes, connection)
    except OSError as error:
        return NoSharedMemory(f"expected a segment, got a descriptor that fails: {error.strerror}")


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process at the other end, as the kernel saw it connect or listen. The pid
    is 0 in another pid namespace."""
    size = _CREDENTIALS.size
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def _pidfd(connection: socket.socket) -> int | None:
    """None where the kernel has no pidfds, or this process must not use them."""
    with suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    # The pid is still the peer's: all ranks meet in the store once more before this is used.
    pid, _ = credentials(connection)
    with suppress(OSError):
        return os.pidfd_open(pid) if pid else None
    return None
