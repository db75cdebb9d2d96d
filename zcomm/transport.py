"""Transport: the bytes of one engine, over process groups that nobody else uses.

Collectives of one group must be issued in one order on all ranks, so the engine has groups of its
own: torch, DDP and the user go on with theirs. There are two, one for each hop, because whether a
chunk's second hop comes before or after the next bucket's first one differs from rank to rank.
They are not registered with torch.distributed: names of groups made later do not depend on them.
"""

from __future__ import annotations

import ctypes
import json
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm import arguments

# How long a failing rank waits for the others to say that they are alive, at most.
_GRACE_S = 2.5
_POLL_S = 0.05
_GAVE_UP = "gave up in"

PrefixStore = dist.distributed_c10d.PrefixStore


class Work(Protocol):
    """What torch returns for a collective that has been started."""

    def is_completed(self) -> bool: ...
    def wait(self, timeout: timedelta = ...) -> object: ...


class CommunicationError(RuntimeError):
    """A peer died, stalled or failed. The message says where, and which rank if that is known."""


class Channel:
    """One process group. Collectives are issued by one thread, in the same order on all ranks."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def all_to_all(
        self, out: Tensor, send: Tensor, out_splits: list[int], send_splits: list[int]
    ) -> Work:
        """Starts it."""
        work: Work = self._group.alltoall_base(out, send, out_splits, send_splits)
        return work

    def abandon(self) -> None:
        """Lets the group outlive all that knows it.

        gloo cannot cancel what is under way, and the end of a group waits for it: up to the
        timeout, in whatever thread drops the last reference, or at the end of the process.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def release(self) -> None:
        """Ends the group and its threads, unless it was abandoned."""
        self._group = None


class Transport:
    """Two channels over the ranks of a group, and a way to find out which rank failed."""

    def __init__(self, group: Any, name: str, timeout_s: float) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        # The groups' own timeout leaves time to ask who failed before the deadline.
        self.grace_s = min(_GRACE_S, timeout_s / 4)
        self._reported = False
        self._store = PrefixStore(f"zcomm/{name}", dist.distributed_c10d._get_default_store())
        self.reduce, self.gather = (
            Channel(_own_group(group, self._store, hop, timeout_s - self.grace_s))
            for hop in ("reduce", "gather")
        )

    def abandon(self) -> None:
        self.reduce.abandon()
        self.gather.abandon()

    def release(self) -> None:
        self.reduce.release()
        self.gather.release()

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
        """The error of ranks whose signatures differ; has all that can be had."""
        self.report(signature)
        signatures, _ = self._reports()
        signatures[self.rank] = signature
        values = "; ".join(f"rank {r}: {s}" for r, s in sorted(signatures.items()))
        return ValueError(f"rank {self.rank}: expected the same call on all ranks, got {values}")

    def _reports(self) -> tuple[dict[int, str], list[int]]:
        """What the other ranks reported, and those that did not within the grace period."""
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


def _own_group(group: Any, store: Any, hop: str, timeout_s: float) -> Any:
    """A group over the same ranks. Not gloo: through torch, which must register it."""
    timeout = timedelta(seconds=timeout_s)
    if isinstance(_cpu_backend(group), dist.ProcessGroupGloo):
        inner = PrefixStore(hop, store)
        return dist.ProcessGroupGloo(
            inner, dist.get_rank(group), dist.get_world_size(group), timeout
        )
    return dist.new_group(
        dist.get_process_group_ranks(group or dist.group.WORLD),
        timeout=timeout,
        backend=dist.get_backend(group),
        use_local_synchronization=True,
    )


def _cpu_backend(group: Any) -> Any:
    whole: Any = group or dist.group.WORLD
    return whole._get_backend(torch.device("cpu"))


def group_timeout_s(group: Any) -> float:
    """The timeout that a group was made with."""
    timeout = getattr(getattr(_cpu_backend(group), "options", None), "_timeout", None)
    return (timeout or dist.default_pg_timeout).total_seconds()


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
    if t.device.type != "cpu":
        raise ValueError(
            f"{what}: expected a tensor on the CPU, got {t.device}; other devices are not "
            "supported yet"
        )


def exchange(value: Mapping[str, str], group: Any) -> tuple[Sequence[Mapping[str, str]], str]:
    """Every rank's value, in rank order, and a name that all ranks share and none used before."""
    mine = json.dumps([dict(value), uuid.uuid4().hex[:12]]).encode()
    everyone = [json.loads(theirs) for theirs in gather_bytes(mine, group)]
    return [settings for settings, _ in everyone], everyone[0][1]


def gather_bytes(mine: bytes, group: Any = None) -> list[bytes]:
    """Every rank's bytes, in rank order. (torch's own collectives of objects need NumPy.)"""
    world_size = dist.get_world_size(group)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
    if mine:
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    everyone = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(everyone, padded, group=group)
    return [ctypes.string_at(t.data_ptr(), int(size)) for t, size in zip(everyone, sizes)]
