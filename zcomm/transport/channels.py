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
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zcomm.base import arguments
from zcomm.sharding.hierarchy import Hosts
from zcomm.torch_private import c10d

# How long a failing rank waits for the others to say that they are alive, at most.
_GRACE_S = 2.5
_POLL_S = 0.05
_GAVE_UP = "gave up in"
_CPU = torch.device("cpu")


class CommunicationError(RuntimeError):
    """A peer died, stalled or failed. The message says where, and which rank if that is known."""


class Channel:
    """One process group. Collectives are issued by one thread, in the same order on all ranks."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def all_to_all(
        self, out: Tensor, send: Tensor, out_splits: list[int], send_splits: list[int]
    ) -> "dist.Work":
        """Starts it."""
        work: dist.Work = c10d.all_to_all(self._group)(out, send, out_splits, send_splits)
        return work

    def abandon(self) -> None:
        """Keeps the group alive forever.

        gloo cannot cancel an operation, and the end of a group waits for it: up to the timeout, in
        whatever thread drops the last reference, or at the end of the process.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def release(self) -> None:
        """Ends the group and its threads, unless it was abandoned."""
        self._group = None


class Channels(NamedTuple):
    """The channels of chunks on their way to the owners, and back to all ranks."""

    reduce: Channel
    gather: Channel


class Transport:
    """Channels over the ranks of a group, and a way to find out which rank failed."""

    def __init__(
        self,
        group: Any,
        name: str,
        timeout_s: float,
        device: torch.device = _CPU,
        *,
        in_order: bool = False,
        hosts: Hosts | None = None,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        # The groups time out early enough to ask who failed before the deadline.
        self.grace_s = min(_GRACE_S, timeout_s / 4)
        self._reported = False
        self._store = c10d.PrefixStore(f"zcomm/{name}", c10d.default_store())
        self.deadline_s = timeout_s - self.grace_s
        everyone = range(self.world_size)
        # NCCL kills the process at its timeout: that comes after the engine has said why.
        groups = _Groups(group, self._store, timeout_s + self.grace_s, self.deadline_s, device)
        self.check = Channel(groups.gloo(everyone, "check")) if in_order else None
        self.flat = groups.channels(everyone, "all", in_order)
        self.local = groups.channels(hosts.neighbours, "local", in_order) if hosts else None
        self.across = groups.channels(hosts.column, "across", in_order) if hosts else None

    def signatures(self) -> Channel:
        """The channel over which signatures are compared."""
        return self.check or self.flat.reduce

    def channels(self) -> list[Channel]:
        """All channels that chunks pass through, in the order of the hops; each once."""
        pairs = [pair for pair in (self.local, self.across, self.flat) if pair is not None]
        there, back = [p.reduce for p in pairs], [p.gather for p in reversed(pairs)]
        return list(dict.fromkeys([*there, *back]))

    def abandon(self) -> None:
        for channel in {self.signatures(), *self.channels()}:
            channel.abandon()

    def release(self) -> None:
        for channel in {self.signatures(), *self.channels()}:
            channel.release()

    def report(self, text: str) -> None:
        """Tells the others that this rank failed, or gave up because another did; once."""
        if not self._reported:
            self._reported = True
            self._store.set(f"failed/{self.rank}", text)
            self._store.set("failed", "")

    def peer_failed(self) -> bool:
        return bool(self._store.check(["failed"]))

    def failure(self, what: str, error: BaseException | None = None) -> CommunicationError:
        """The error of a collective that failed; names the ranks that failed or are silent."""
        text = f"rank {self.rank}: {what} failed" + (f": {error}" if error else "")
        try:
            self.report(f"{_GAVE_UP} {what}")
            found, silent = self._reports()
        except Exception as unreachable:
            return CommunicationError(
                f"{text}. Which rank failed is not known: the store does not answer "
                f"({unreachable}); the process that keeps it, mostly rank 0, may be dead"
            )
        failed = [f"rank {r}: {s}" for r, s in found.items() if not s.startswith(_GAVE_UP)]
        if silent:
            names = ", ".join(f"rank {r}" for r in silent)
            failed.append(f"{names} did not answer: dead, stopped, or busy with something else")
        return CommunicationError(f"{text}. {'; '.join(failed) or 'All ranks are alive'}")

    def disagreement(self, signature: str) -> ValueError:
        """The error of ranks whose signatures differ, with every signature it can get."""
        self.report(signature)
        signatures, _ = self._reports()
        signatures[self.rank] = signature
        values = "; ".join(f"rank {r}: {s}" for r, s in sorted(signatures.items()))
        return ValueError(f"rank {self.rank}: expected the same call on all ranks, got {values}")

    def _reports(self) -> tuple[dict[int, str], list[int]]:
        """What the other ranks reported, and the ranks silent throughout the grace period."""
        silent = [r for r in range(self.world_size) if r != self.rank]
        found: dict[int, str] = {}
        deadline = monotonic() + self.grace_s
        while True:
            for r in list(silent):
                if self._store.check([f"failed/{r}"]):
                    found[r] = self._store.get(f"failed/{r}").decode()
                    silent.remove(r)
            if not silent or monotonic() > deadline:
                return found, silent
            sleep(_POLL_S)


class _Groups:
    """Makes groups over some ranks of a group, to which this rank belongs."""

    def __init__(
        self, group: Any, store: Any, timeout_s: float, gloo_timeout_s: float, device: torch.device
    ) -> None:
        self._group, self._store, self._device = group, store, device
        self._timeout = timedelta(seconds=timeout_s)
        self._gloo_timeout = timedelta(seconds=gloo_timeout_s)

    def channels(self, ranks: Iterable[int], name: str, in_order: bool) -> Channels:
        """A channel for each direction; one for both if everything is issued in one order."""
        if in_order:
            both = Channel(self._make(ranks, name))
            return Channels(both, both)
        hops = (Channel(self._make(ranks, f"{name}/{hop}")) for hop in Channels._fields)
        return Channels(*hops)

    def gloo(self, ranks: Iterable[int], name: str) -> Any:
        members = sorted(ranks)
        store = c10d.PrefixStore(f"{name}/{members[0]}", self._store)
        rank = members.index(dist.get_rank(self._group))
        return c10d.Gloo(store, rank, len(members), self._gloo_timeout)

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


def exchange(value: Mapping[str, str], group: Any) -> tuple[Sequence[Mapping[str, str]], str]:
    """Every rank's value, in rank order, and a name that all ranks share and none used before."""
    mine = json.dumps([dict(value), uuid.uuid4().hex[:12]]).encode()
    everyone = [json.loads(theirs) for theirs in gather_bytes(mine, group)]
    return [settings for settings, _ in everyone], everyone[0][1]


def gather_bytes(mine: bytes, group: Any = None) -> list[bytes]:
    """Every rank's bytes, in rank order. (torch's own collectives of objects need NumPy.)"""
    sizes = [int(size) for size in _gather(torch.tensor([len(mine)], device="cpu"), group)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    if mine:
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    everyone = _gather(padded, group)
    return [ctypes.string_at(t.data_ptr(), size) for t, size in zip(everyone, sizes)]


def _gather(mine: Tensor, group: Any) -> list[Tensor]:
    """Every rank's tensor, of the same size; through the device if the group has no CPU backend."""
    sent = mine if c10d.backend_of(group, _CPU) is not None else mine.cuda()
    everyone = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, sent, group=group)
    return [theirs.cpu() for theirs in everyone]
