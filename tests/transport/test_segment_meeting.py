"""How segments are handed over: to peers in any order, and to nobody else."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from segment_party import NBYTES, Party, left_names, open_fds
from zcomm.transport.shared_memory import NoSharedMemory, meeting
from zcomm.transport.shared_memory.meeting import Address, listen

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="other users need root")


@pytest.fixture
def party() -> Iterator[Party]:
    """Two ranks. Whatever comes in between, no descriptor is left in the end."""
    before = open_fds()
    two = Party(2)
    yield two
    two.close()
    assert open_fds() == before
    assert left_names(two.addresses) == []


STRANGERS: dict[str, Callable[[Party, socket.socket], object]] = {
    "says nothing": lambda party, to: None,
    "leaves": lambda party, to: to.shutdown(socket.SHUT_RDWR),
    "empty": lambda party, to: to.send(b""),
    "cut": lambda party, to: to.send(party.greeting(1)[:-1]),
    "long": lambda party, to: to.send(party.greeting(1) + bytes(50_000)),
    "garbage": lambda party, to: to.send(os.urandom(20)),
    "wrong token": lambda party, to: to.send(Address.fresh().greeting(1)),
    "token of another": lambda party, to: to.send(party.addresses[0].greeting(1)),
    "rank that it calls": lambda party, to: to.send(party.greeting(0)),
    "unknown rank": lambda party, to: to.send(party.addresses[1].greeting(9)),
    "descriptors": lambda party, to: socket.send_fds(to, [os.urandom(20)], [0, 0, 0]),
    "descriptor too early": lambda party, to: socket.send_fds(to, [party.greeting(1)], [0]),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_gets_nothing_and_holds_nobody_up(party: Party, stranger: str) -> None:
    first = party.start(0)
    with party.call(0) as connection:
        STRANGERS[stranger](party, connection)
        time.sleep(0.02)
        party.met(first, party.start(1))
        with contextlib.suppress(ConnectionResetError):
            assert connection.recvmsg(100, 100)[:2] == (b"", [])


def memfd(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("theirs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


SEALED = 0x17
BAD_SEGMENTS: dict[str, tuple[Callable[[], list[int]], str]] = {
    "none": (list, "expected a message with 1 descriptors, once, got one with 0"),
    "two": (lambda: [memfd(NBYTES, SEALED), memfd(NBYTES, SEALED)], "got one with 2"),
    "many": (
        lambda: [memfd(NBYTES, SEALED) for _ in range(5)],
        "expected one descriptor, got more",
    ),
    "no seals": (lambda: [memfd(NBYTES, 0)], "with seals 0x17, got 0x0"),
    "can shrink": (lambda: [memfd(NBYTES, SEALED & ~2)], "with seals 0x17, got 0x15"),
    "can grow": (lambda: [memfd(NBYTES, SEALED & ~4)], "with seals 0x17, got 0x13"),
    "writable": (lambda: [memfd(NBYTES, SEALED & ~16)], "with seals 0x17, got 0x7"),
    "small": (lambda: [memfd(NBYTES - 1, SEALED)], f"{NBYTES} bytes, got {NBYTES - 1}"),
    "large": (lambda: [memfd(NBYTES + 1, SEALED)], f"{NBYTES} bytes, got {NBYTES + 1}"),
    "a file": (lambda: [os.open(__file__, os.O_RDONLY)], "a descriptor that fails: Invalid"),
    "an event": (lambda: [os.eventfd(0)], "a descriptor that fails: Invalid"),
}


@pytest.mark.parametrize("bad", BAD_SEGMENTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_bad_segment_is_refused_with_the_reason(party: Party, rank: int, bad: str) -> None:
    """On both sides: rank 0 is called, rank 1 calls."""
    make, reason = BAD_SEGMENTS[bad]
    other, listener = 1 - rank, listen(party.addresses[1 - rank])
    listener.settimeout(5.0)
    called = party.start(rank)
    connection = party.call(0) if other else listener.accept()[0]
    with listener, connection:
        if other:
            connection.send(party.greeting(1))
        received = socket.recv_fds(connection, 100, 4)
        fds = make()
        socket.send_fds(connection, [party.greeting(other)], fds)
        found = called.result()
    for fd in (*fds, *received[1]):
        os.close(fd)
    assert isinstance(found, NoSharedMemory)
    assert found.reason.startswith(f"rank {other}: ")
    assert reason in found.reason
    assert len(received[1]) == other  # a caller sends its segment only in exchange for one


def as_nobody(fn: Callable[[], object]) -> str:
    """What `fn` returns, as text, in a process of another user."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(write, repr(fn()).encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    return said


@needs_root
def test_another_user_who_knows_a_token_gets_nothing(party: Party) -> None:
    def intrude() -> object:
        with party.call(0) as connection:
            with contextlib.suppress(BrokenPipeError):
                connection.send(party.greeting(1))
            with contextlib.suppress(ConnectionResetError):
                return connection.recvmsg(100, 100)[:2]
            return (b"", [])

    first = party.start(0)
    assert as_nobody(intrude) == repr((b"", []))
    party.met(first, party.start(1))


@needs_root
def test_another_user_who_took_a_name_gets_nothing(party: Party) -> None:
    os.seteuid(NOBODY)
    try:
        listener = listen(party.addresses[0])
    finally:
        os.seteuid(0)
    with listener:
        found = party.start(1).result()
        connection, _ = listener.accept()
        with connection:
            assert connection.recvmsg(100, 100)[:2] == (b"", [])
    assert found == NoSharedMemory(f"rank 0: expected a process of uid 0, got one of uid {NOBODY}")


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 1, 2), (2, 1, 0)])
def test_ranks_come_in_any_order(order: tuple[int, ...]) -> None:
    """All listen before the first one calls; some are slow from then on."""
    three = Party(3)
    meetings = {rank: three.prepare(rank) for rank in order}
    started = []
    for rank in order:
        started.append(three.threads.submit(meetings[rank].hold))
        time.sleep(0.05)
    for rank, peers in zip(order, three.met(*started)):
        assert peers.keys() == {0, 1, 2} - {rank}
        with pytest.raises(ConnectionRefusedError):
            three.call(rank)  # nobody listens any more
    three.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_does_not_come_or_answer_ends_at_the_deadline(party: Party, rank: int) -> None:
    with listen(party.addresses[1 - rank]), listen(Address.fresh()):
        started = time.monotonic()
        found = party.start(rank, timeout_s=0.3).result()
        assert 0.25 < time.monotonic() - started < 2.0
    assert found == NoSharedMemory(f"no segment of ranks [{1 - rank}] in 0.3 s")


def test_a_peer_that_is_gone_is_a_reason(party: Party) -> None:
    assert party.start(1).result() == NoSharedMemory(
        "rank 0: cannot be reached: Connection refused"
    )


def test_the_reason_says_who_was_refused(party: Party) -> None:
    called = party.start(0, timeout_s=0.3)
    with party.call(0) as connection:
        connection.send(b"hello")
        why = "refused a connection: expected a greeting of 20 bytes, got 5 bytes"
        assert called.result().reason == f"no segment of ranks [1] in 0.3 s; {why}"


def test_a_second_process_with_the_token_of_a_peer_is_refused(party: Party) -> None:
    called = party.start(0)
    with party.call(0) as first, party.call(0) as second:
        for connection in (first, second):
            connection.send(party.greeting(1))
        [fd] = socket.recv_fds(first, 100, 4)[1]
        os.close(fd)
        assert second.recvmsg(100, 100)[:2] == (b"", [])
    assert "rank 1: " in called.result().reason


def test_programs_that_a_rank_runs_get_no_descriptors(party: Party) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        socket.send_fds(here, [b"x"], [0])
        _, [fd], _ = meeting._receive(there)
        assert not os.get_inheritable(fd)
        os.close(fd)
    for peers in party.met(party.start(0), party.start(1)):
        assert not any(os.get_inheritable(peer.life_fd) for peer in peers.values())


def test_a_process_that_may_open_no_more_says_so(party: Party) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    first, second = party.prepare(0, 0.5), party.prepare(1, 0.5)
    fds = [os.dup(0)]
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limit[1])
    )
    try:
        with contextlib.suppress(OSError):
            while True:
                fds.append(os.dup(0))
        started = [party.threads.submit(one.hold) for one in (first, second)]
        reasons = [one.result().reason for one in started]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for fd in fds:
            os.close(fd)
    assert any("Too many open files" in reason for reason in reasons)


@needs_root
def test_ranks_wait_for_their_turn_when_too_many_descriptors_are_in_flight(party: Party) -> None:
    """The kernel counts them per user, and does not limit root."""

    def meet_late() -> object:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(OSError):
            while True:
                socket.send_fds(here, [b"x"], [0] * 20)
        two = Party(2)
        meetings = [two.start(0), two.start(1)]
        time.sleep(0.2)
        waited = not any(one.done() for one in meetings)
        here.close()
        there.close()
        return waited, [list(peers) for peers in two.met(*meetings)]

    assert as_nobody(meet_late) == repr((True, [[1], [0]]))
