"""Segments: memory that the ranks of a host share, whether peers live, and what is left of it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from ranks import World
from segment_party import NBYTES, Party, left_names, mapped_segments, open_fds, vm_bytes
from zcomm.transport.handshake import Caller
from zcomm.transport.shared_memory import (
    NoSharedMemory,
    PeerSegment,
    Segment,
    SharedMemory,
    segment,
    share,
)
from zcomm.transport.shared_memory.meeting import Address, Meeting, listen

FORK = multiprocessing.get_context("fork")
LIBC = ctypes.CDLL(None, use_errno=True)
KEPT: list[SharedMemory] = []  # never closed
CLONE_NEWUTS, CLONE_NEWPID = 0x04000000, 0x20000000

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")


# Ranks of one group, in processes of their own.


def shared(rank: int, world_size: int) -> tuple[list[int], list[str], list[str]]:
    """What this rank reads of its peers, how its memory is mapped, and what is in /dev/shm."""
    memory = share(NBYTES, Caller("shared", None, 60.0))
    assert not isinstance(memory, NoSharedMemory), memory
    KEPT.append(memory)
    ctypes.memset(memory.segment.address, rank + 1, NBYTES)
    dist.barrier()
    assert all(peer.alive() for peer in memory.peers.values())
    seen = {r: ctypes.string_at(peer.address, NBYTES) for r, peer in memory.peers.items()}
    assert all(theirs == bytes([r + 1]) * NBYTES for r, theirs in seen.items())
    dist.barrier()
    return sorted(seen), mapped_segments(), os.listdir("/dev/shm")


def refused(rank: int, world_size: int, odd: str) -> tuple[str, int]:
    """The reason why there is no shared memory if rank 1 is odd, and the descriptors left."""
    os.environ["ZCOMM_SHM"] = "0" if odd == "off" and rank == 1 else "1"
    odd_nbytes = {"size": 2 * NBYTES, "nothing": 0}
    nbytes = odd_nbytes.get(odd, NBYTES) if rank == 1 else NBYTES
    before = open_fds()
    memory = share(nbytes, Caller("refused", None, 60.0))
    assert isinstance(memory, NoSharedMemory)
    return memory.reason, open_fds() - before


def shared_by_hosts(rank: int, world_size: int) -> str:
    """Ranks 0 and 1 share a host; each other rank has one of its own."""
    with open("/proc/thread-self/ns/uts") as home:
        assert LIBC.unshare(CLONE_NEWUTS) == 0
        socket.sethostname(f"host-{max(rank, 1)}")
        memory = share(NBYTES, Caller("shared_by_hosts", None, 60.0))
        assert LIBC.setns(home.fileno(), CLONE_NEWUTS) == 0
    return memory.reason if isinstance(memory, NoSharedMemory) else str(list(memory.peers))


def shared_often(rank: int, world_size: int) -> tuple[int, int]:
    def once() -> None:
        memory = share(NBYTES, Caller("shared_often", None, 60.0))
        assert not isinstance(memory, NoSharedMemory)
        memory.close()
        memory.close()

    once()
    before = open_fds(), len(mapped_segments())
    for _ in range(10):
        once()
    return open_fds() - before[0], len(mapped_segments()) - before[1]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(16) as started:
        yield started


def test_sixteen_ranks_read_each_other(world: World) -> None:
    """They never close their segments: that they exit without an error is the end of `world`."""
    in_dev_shm = os.listdir("/dev/shm")
    for rank, (seen, maps, files) in enumerate(world.run(shared)):
        assert seen == [r for r in range(16) if r != rank]
        assert maps == ["r--s"] * 15 + ["rw-s"]
        assert not set(files) - set(in_dev_shm)


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ("off", "rank 1: ZCOMM_SHM=0 turns shared memory off"),
        ("nothing", "rank 1: cannot share 0 bytes of memory: Invalid argument"),
        ("size", f"expected a segment of {NBYTES} bytes, got {2 * NBYTES}"),
    ],
)
def test_one_odd_rank_means_none_of_the_host_has_it(world: World, odd: str, reason: str) -> None:
    reasons, left = zip(*world.run(refused, odd))
    assert len(set(reasons)) == 1
    assert reason in reasons[0]
    assert not any(left)


def test_ranks_leave_nothing_behind_when_they_close(world: World) -> None:
    assert world.run(shared_often) == [(0, 0)] * 16


@needs_root
def test_only_ranks_of_one_host_share(world: World) -> None:
    first, second, *others = world.run(shared_by_hosts)
    assert (first, second) == ("[1]", "[0]")
    reason = "no other rank of the group is on its host"
    assert others == [f"rank {rank}: {reason}" for rank in range(2, 16)]


# One segment.


def test_only_the_owner_ever_writes_a_segment() -> None:
    mine = Segment.create(NBYTES)
    ctypes.memset(mine.address, 7, NBYTES)
    again = os.open(f"/proc/self/fd/{mine.fd}", os.O_RDWR)
    attempts: list[Callable[[int], object]] = [
        lambda fd: mmap.mmap(fd, NBYTES),
        lambda fd: os.pwrite(fd, b"x", 0),
        lambda fd: os.ftruncate(fd, NBYTES - 1),
        lambda fd: os.ftruncate(fd, NBYTES + 1),
        lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        lambda fd: os.fchmod(fd, 0o777),  # MFD_NOEXEC_SEAL
    ]
    for attempt in attempts:
        for fd in (mine.fd, again):
            with pytest.raises(PermissionError):
                attempt(fd)
    theirs = segment.map_theirs(mine.fd, NBYTES, socket.socketpair()[0])
    assert isinstance(theirs, PeerSegment)
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    assert LIBC.mprotect(ctypes.c_void_p(theirs.address), NBYTES, writable) == -1
    assert not os.get_inheritable(mine.fd)
    assert ctypes.string_at(theirs.address, NBYTES) == bytes([7]) * NBYTES
    os.close(again)
    theirs.close()
    mine.close()


def test_an_older_kernel_that_knows_fewer_flags_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "_MFD_NOEXEC_SEAL", 1 << 20)  # no kernel knows this one
    mine = Segment.create(NBYTES)
    assert fcntl.fcntl(mine.fd, fcntl.F_GET_SEALS) == 0x17
    mine.close()


def test_200_rounds_leave_no_descriptor_and_no_memory() -> None:
    nbytes = 1 << 20
    for rounds in (5, 200):  # the first ones are for what threads keep
        before = open_fds(), vm_bytes(), mapped_segments()
        for _ in range(rounds):
            two = Party(2, nbytes)
            two.met(two.start(0), two.start(1))
            two.close()
            two.close()
    assert open_fds() == before[0]
    assert vm_bytes() - before[1] < 200 * nbytes  # a leak would be four times that
    assert mapped_segments() == before[2]


# Peers that end.


def test_a_forked_child_has_neither_memory_nor_descriptors() -> None:
    two = Party(2)
    before = open_fds()
    two.met(two.start(0), two.start(1))
    two.threads.shutdown()
    read, write = os.pipe()
    if not (pid := os.fork()):
        os.write(write, repr((open_fds() - before, mapped_segments())).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 1000) == b"(2, [])"  # the pipe
    assert len(mapped_segments()) == 4
    assert all(peer.alive() for peer in two.peers)
    os.close(read)
    os.close(write)
    two.close()


def be_a_peer(addresses: dict[int, Address], pipe: Connection) -> None:
    """Rank 1. It forks a child, which outlives it, and neither closes anything."""
    met = Meeting(1, Segment.create(NBYTES), listen(addresses[1]), addresses, 5.0).hold()
    if os.fork() == 0:
        time.sleep(3.0)
        os._exit(0)
    pipe.send(list(met))
    time.sleep(60.0)


def watch(addresses: dict[int, Address], pipe: Connection) -> None:
    """Rank 0, which says of rank 1 whether it lives, and how it found out."""
    met = Meeting(0, Segment.create(NBYTES), listen(addresses[0]), addresses, 5.0)
    pipe.send("listens")
    [peer] = met.hold().values()  # type: ignore[union-attr]
    kind = os.readlink(f"/proc/self/fd/{peer.life_fd}").split(":")[0]
    while pipe.recv() == "look":
        pipe.send((peer.alive(), kind, ctypes.string_at(peer.address, NBYTES) == bytes(NBYTES)))


def watch_from_outside(addresses: dict[int, Address], pipe: Connection) -> None:
    """The same in another pid namespace, on a kernel without SO_PEERPIDFD."""
    segment._SO_PEERPIDFD = 9999
    assert LIBC.unshare(CLONE_NEWPID) == 0
    if os.fork() == 0:
        watch(addresses, pipe)
        os._exit(0)
    os.wait()


def watch_without_peerpidfd(addresses: dict[int, Address], pipe: Connection) -> None:
    segment._SO_PEERPIDFD = 9999  # to which the kernel says what it says to an unknown option
    watch(addresses, pipe)


@contextlib.contextmanager
def forked(target: Callable[..., None], addresses: dict[int, Address]) -> Iterator[tuple]:
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=target, args=(addresses, theirs))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


@needs_root
@pytest.mark.parametrize(
    ("watcher", "kind"),
    [
        (watch, "anon_inode"),
        (watch_without_peerpidfd, "anon_inode"),
        (watch_from_outside, "socket"),
    ],
)
def test_the_death_of_a_peer_is_seen(watcher: Callable[..., None], kind: str) -> None:
    addresses = {r: Address.fresh() for r in range(2)}
    with forked(watcher, addresses) as (watching, eye):
        assert eye.recv() == "listens"
        with forked(be_a_peer, addresses) as (peer, pipe):
            assert pipe.recv() == [0]
            for stop in (signal.SIGCONT, signal.SIGSTOP):
                os.kill(peer.pid, stop)
                eye.send("look")
                assert eye.recv() == (True, kind, True)
            peer.kill()
            time.sleep(0.2)
            eye.send("look")
            assert eye.recv() == (False, kind, True)
        eye.send("end")
        watching.join()
    assert left_names(addresses) == []
