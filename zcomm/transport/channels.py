"""Transport: the bytes of one engine, over process groups that nobody else uses.

Collectives of one group must be issued in one order on all ranks, so the engine has its own groups:
torch, DDP and the user keep theirs. There are two, one for each hop, because whether a chunk's
second hop comes before or after the next bucket's first one differs from rank to rank. They are not
registered with torch.distributed, so the names of groups made later do not depend on them. An
engine that issues both hops in one fixed order has one group for both, and a gloo group to compare
signatures; torch makes and registers a device's group. With hosts there are as many again for the
ranks of this host, and for those of its column.
"""

import ctypes
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zcomm.base import arguments
from zcomm.sharding.hierarchy import Hosts
from zcomm.torch_private import c10d
from zcomm.transport.failure_notes import CommunicationError, FailureNotes
from zcomm.transport.handshake import Caller
from zcomm.transport.shared_memory.ring import Ring, make_ring
from zcomm.transport.shared_memory.segment import NoSharedMemory
from zcomm.transport.store import Store, StoreError, in_short

# How long a failing rank waits for the others to say that they are alive, at most.
_GRACE_S = 2.5
_CPU = torch.device("cpu")


class Channel:
    """One process group. One thread at a time issues its collectives, in one order on all ranks."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._group: Any = None

    def connect(self) -> None:
        """All ranks of the group call it, in one order of channels; the first call counts."""
        if self._group is None:
            self._group = self._make()

    @property
    def is_connected(self) -> bool:
        return self._group is not None

    def all_to_all(
        self, out: Tensor, send: Tensor, out_splits: list[int], send_splits: list[int]
    ) -> "dist.Work":
        """Starts it."""
        work: dist.Work = c10d.all_to_all(self._group)(out, send, out_splits, send_splits)
        return work

    def all_reduce(self, t: Tensor) -> "dist.Work":
        """Starts torch's own, to compare with."""
        work: dist.Work = self._group.allreduce([t])
        return work

    def abandon(self) -> None:
        """Keeps the group alive forever.

        gloo cannot cancel an operation, and the end of a group waits for it: up to the timeout, in
        whatever thread drops the last reference, or at the end of the process.
        """
        if self._group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def release(self) -> None:
        """Ends the group and its threads, unless it was abandoned."""
        self._group = None


class Channels(NamedTuple):
    """The channels of chunks on their way to the owners, and back to all ranks."""

    reduce: Channel
    gather: Channel


class Transport:
    """Channels over the ranks of a group, and a way to find out which rank failed.

    With `share`, ranks of one host get a ring, memory that they share: all ranks of the group, or
    with hosts those of each. Their channels connect only when something does not fit into it.
    """

    def __init__(
        self,
        group: Any,
        name: str,
        timeout_s: float,
        device: torch.device = _CPU,
        *,
        in_order: bool = False,
        hosts: Hosts | None = None,
        share: Caller | None = None,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        # The groups time out early enough to ask who failed before the deadline.
        grace_s = min(_GRACE_S, timeout_s / 4)
        store = Store(name)
        self.notes = FailureNotes(store, self.ranks[self.rank], self.ranks, grace_s)
        self.deadline_s = timeout_s - grace_s
        everyone = range(self.world_size)
        # NCCL kills the process at its timeout: that comes after the engine has said why.
        groups = _Groups(group, store, timeout_s + grace_s, self.deadline_s, device)
        self.check = Channel(partial(groups.gloo, everyone, "check")) if in_order else None
        self.flat = groups.channels(everyone, "all", in_order)
        inside = hosts.neighbours if hosts and not hosts.is_alone else ()
        self.local = groups.channels(inside, "local", in_order) if inside else None
        self.across = groups.channels(hosts.column, "across", in_order) if hosts else None
        self._backend = c10d.backend_of(group, device).name()
        self.ring: Ring | NoSharedMemory = NoSharedMemory("the tensors are not on the CPU")
        if share is not None:
            members = None if hosts is None else hosts.neighbours
            self.ring = make_ring(share, self.deadline_s, members)
        late = set() if isinstance(self.ring, NoSharedMemory) else self._inside()
        for channel in self._all_channels():
            if channel not in late:
                channel.connect()

    def _inside(self) -> set[Channel]:
        """The channels that a ring replaces."""
        return set(self.local or ()) if self.across else {self.signatures(), *self.flat}

    def connect_late(self) -> None:
        """Connects channels that the ring has made unnecessary so far. All ranks call it."""
        late = [channel for channel in self._all_channels() if not channel.is_connected]
        for channel in late:
            channel.connect()
        # gloo cannot finish connecting to a rank that is through with it and closes at once.
        ranks = len(self.ring.members) if isinstance(self.ring, Ring) else self.world_size
        started = perf_counter()
        try:
            for channel in late:
                everyone, mine = (torch.zeros(ranks, dtype=torch.uint8) for _ in range(2))
                channel.all_to_all(everyone, mine, [1] * ranks, [1] * ranks).wait()
        except RuntimeError as error:
            what = "the first exchange that does not fit into shared memory"
            raise self.notes.failure(what, error, perf_counter() - started) from error

    @property
    def route(self) -> str:
        """What chunks go over: shared memory, or a backend and why. The rare job whose chunks do
        not fit into the ring goes over the backend in any case."""
        if isinstance(self.ring, NoSharedMemory):
            return f"{self._backend}: {self.ring.reason}"
        between = f" inside hosts, {self._backend} between them" if self.across else ""
        return f"shared memory{between}"

    def signatures(self) -> Channel:
        """The channel over which signatures are compared."""
        return self.check or self.flat.reduce

    def channels(self) -> list[Channel]:
        """All channels that chunks pass through, in the order of the hops; each once."""
        pairs = [pair for pair in (self.local, self.across, self.flat) if pair is not None]
        there, back = [p.reduce for p in pairs], [p.gather for p in reversed(pairs)]
        return list(dict.fromkeys([*there, *back]))

    def _all_channels(self) -> list[Channel]:
        """In one order on all ranks."""
        return list(dict.fromkeys([self.signatures(), *self.channels()]))

    def give_up(self) -> None:
        """Tells the ranks of this host that this one does nothing more."""
        if isinstance(self.ring, Ring):
            self.ring.give_up()

    def interrupt(self) -> None:
        """From another thread: the engine is to stop and must not wait for its peers."""
        if isinstance(self.ring, Ring):
            self.ring.interrupt()

    def abandon(self) -> None:
        for channel in self._all_channels():
            channel.abandon()

    def release(self) -> None:
        for channel in self._all_channels():
            channel.release()
        if isinstance(self.ring, Ring):
            self.ring.close()


class _Groups:
    """Makes groups over some ranks of a group, to which this rank belongs."""

    def __init__(
        self,
        group: Any,
        store: Store,
        timeout_s: float,
        gloo_timeout_s: float,
        device: torch.device,
    ) -> None:
        self._group, self._store, self._device = group, store, device
        self._timeout = timedelta(seconds=timeout_s)
        self._gloo_timeout = timedelta(seconds=gloo_timeout_s)

    def channels(self, ranks: Iterable[int], name: str, in_order: bool) -> Channels:
        """A channel for each direction; one for both if everything is issued in one order."""
        if in_order:
            both = Channel(partial(self._make, ranks, name))
            return Channels(both, both)
        hops = (Channel(partial(self._make, ranks, f"{name}/{hop}")) for hop in Channels._fields)
        return Channels(*hops)

    def gloo(self, ranks: Iterable[int], name: str) -> Any:
        """Connects to the other members, whose addresses are in the store."""
        members, me = sorted(ranks), dist.get_rank(self._group)
        rank, timeout = members.index(me), self._gloo_timeout

        def connect(inner: Any) -> Any:
            store = c10d.PrefixStore(f"{name}/{members[0]}", inner)
            return c10d.Gloo(store, rank, len(members), timeout)

        try:
            return self._store.answer(connect, timeout.total_seconds())
        except StoreError as error:
            everyone = dist.get_process_group_ranks(self._group or dist.group.WORLD)
            others = [everyone[r] for r in members if r != me]
            raise CommunicationError(
                f"rank {everyone[me]}: a rank among {others} died or stopped before all were "
                f"connected [{in_short(error.__cause__ or error)}]"
            ) from error

    def _make(self, ranks: Iterable[int], name: str) -> Any:
        """A gloo group of our own; any other backend through torch, which must register it."""
        backend = c10d.backend_of(self._group, self._device)
        if isinstance(backend, c10d.Gloo):
            return self.gloo(ranks, name)
        on_cpu = self._device.type == "cpu"
        everyone = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        return dist.new_group(
            [everyone[r] for r in sorted(ranks)],
            timeout=self._gloo_timeout if on_cpu else self._timeout,
            backend=dist.get_backend(self._group) if on_cpu else backend.name(),
            use_local_synchronization=True,
        )


def group_timeout_s(group: Any, device: torch.device = _CPU) -> float:
    """The timeout a group was made with."""
    return c10d.timeout_of(c10d.backend_of(group, device)).total_seconds()


def group_of(given: Any, what: str) -> Any:
    """The process group of a DeviceMesh with one dimension; any other argument as it is."""
    if not isinstance(given, DeviceMesh):
        return given
    if given.ndim != 1:
        raise ValueError(
            f"{what}: expected a group or a DeviceMesh of one dimension, got one of {given.ndim}, "
            f"{given.mesh_dim_names or tuple(given.shape)}; use one of them, such as mesh['dp']"
        )
    return given.get_group()


def member_of(group: Any, what: str) -> tuple[int, int]:
    """This rank in the group, and the group's size; refuses a group of others."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{what}: expected torch.distributed.init_process_group() first")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{what}: expected a group that this rank belongs to, got another one")
    return rank, dist.get_world_size(group)


def expect_sendable(t: Tensor, what: str, remedy: str = "") -> None:
    """Refuses dtypes and devices that the engine cannot send."""
    if t.dtype not in arguments.SENT_DTYPES:
        known = arguments.dtype_names(arguments.SENT_DTYPES)
        raise ValueError(f"{what}: expected dtype {known}, got {t.dtype}{remedy}")
    if t.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"{what}: expected a tensor on the CPU or a CUDA device, got one on {t.device}; move "
            "it there"
        )


def expect_sender(device: torch.device, group: Any, what: str) -> None:
    """Refuses a group that cannot send a device's tensors. gloo takes them for some collectives,
    through host memory, but not for an all-to-all."""
    backend = c10d.backend_of(group, device)
    if backend is None or (device.type != "cpu" and isinstance(backend, c10d.Gloo)):
        raise ValueError(
            f"{what}: expected a group that sends tensors on {device.type}, got backend "
            f"{dist.get_backend(group)!r}; use init_process_group('cpu:gloo,cuda:nccl')"
        )
