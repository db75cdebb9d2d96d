"""The handshake: all ranks of a group meet before their first bytes, and compare their calls.

It goes through the store, never through the user's group: a group waits for its own timeout, half
an hour by default, and cannot say who is missing.

    calls/GROUP/N/RANK      what each rank brought to the group's call number N
    calls/GROUP/N/arrived   how many have come
    calls/GROUP/N/end       how the call ended, decided once: complete, abandoned, or who failed
    last/RANK               the last call of each rank

The first rank that runs out of patience abandons a call. A rank that comes later skips that number,
so a retry meets under the next one.
"""

import functools
import hashlib
import json
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, sleep
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zcomm.base.host import Host
from zcomm.sharding.hierarchy import FOUND, Hierarchy, Hosts, announced, met_hosts
from zcomm.sharding.settings import expect_same
from zcomm.torch_private import c10d
from zcomm.transport.failure_notes import CommunicationError
from zcomm.transport.restarts import expect_fresh_store
from zcomm.transport.store import Store, StoreError

_P = ParamSpec("_P")
_T = TypeVar("_T")
_COMPLETE, _ABANDONED, _FAILED = "complete", "abandoned", "failed: "
_MOST_REST_S = 0.02
# How long a rank that fails by itself tries to tell the others.
_TELL_S = 2.0
# The calls so far, by the name of the group; anew after init_process_group.
_calls: "WeakKeyDictionary[Any, Counter[str]]" = WeakKeyDictionary()


class Caller(NamedTuple):
    """Who calls what, and how long it waits for the others."""

    what: str
    group: Any
    timeout_s: float

    def gather(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order. All of them must make the same call.

        Keep them short: every rank reads all of them from the store.
        """
        if dist.get_world_size(self.group) == 1:
            return [mine]
        meeting = _Meeting(self)
        try:
            # The meeting itself ends in time, unless the store does not answer.
            found = Store("").answer(lambda store: meeting.hold(store, mine), self.timeout_s + 0.5)
        except StoreError as lost:
            meeting.given_up = True
            raise CommunicationError(
                f"rank {meeting.me}: {self.what}: {lost}: its process died or stopped, or its host "
                "cannot be reached"
            ) from lost
        if isinstance(found, CommunicationError):
            raise found
        names = [record.split(b"\0", 1)[0].decode() for record in found]
        if len(set(names)) > 1:
            each = "; ".join(f"rank {r}: {name}" for r, name in zip(meeting.ranks, names))
            raise ValueError(f"rank {meeting.me}: expected the same call on all ranks, got {each}")
        return [record.split(b"\0", 1)[1] for record in found]

    def gather_json(self, mine: Any) -> list[Any]:
        return [json.loads(theirs) for theirs in self.gather(json.dumps(mine).encode())]


class _Meeting:
    """One rank's side of a call, in the store. Ranks are global ones, as in torch's messages."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._deadline = monotonic() + caller.timeout_s
        self._name = c10d.name_of(caller.group)
        self.ranks = dist.get_process_group_ranks(caller.group or dist.group.WORLD)
        self.me = dist.get_rank()
        # Here, in the caller's thread: the number is used up, however the call ends.
        self._counts = _counts()
        self._number = self._counts[self._name] = self._counts[self._name] + 1
        self.given_up = False  # a store that wakes up later must not see it go on

    def hold(self, store: Any, mine: bytes) -> list[bytes] | CommunicationError:
        """Arrives and waits for the others, or for the end of the call; returns how it ended."""
        store = _UntilGivenUp(store, self)
        self._begin(store)
        store.set(f"last/{self.me}", self._caller.what)
        store.set(self.key(self.me), self._caller.what.encode() + b"\0" + mine)
        if store.add(self.key("arrived"), 1) == len(self.ranks):
            self._finish(store, _COMPLETE)
        end = self._wait(store)
        if end == _COMPLETE:
            self._forget_last(store)
            return [store.get(self.key(rank)) for rank in self.ranks]
        return self._error(store, end)

    def fail(self, store: Any, error: BaseException) -> None:
        """Ends the call for everyone, before this rank has come to it."""
        store = _UntilGivenUp(store, self)
        self._begin(store)
        text = f"{type(error).__name__}: {error}"
        store.set(f"last/{self.me}", f"{self._caller.what}, which raised {text}")
        self._finish(store, f"{_FAILED}rank {self.me} failed: {text}")

    def _begin(self, store: Any) -> None:
        """Skips numbers that are over: abandoned, or complete in an earlier life of the group."""
        while self._end(store) in (_ABANDONED, _COMPLETE):
            self._number += 1
        self._counts[self._name] = max(self._number, self._counts[self._name])

    def _wait(self, store: Any) -> str:
        rest_s = 0.0005
        while not (end := self._end(store)):
            if monotonic() > self._deadline:
                return self._finish(store, _ABANDONED)
            sleep(rest_s)
            rest_s = min(2 * rest_s, _MOST_REST_S)
        return end

    def _forget_last(self, store: Any) -> None:
        """All ranks have come, so none will look at the call before this one again."""
        shared = ("arrived", "end") if self.me == self.ranks[0] else ()
        for last in (self.me, *shared):
            store.delete_key(self.key(last, -1))

    def key(self, last: object, later: int = 0) -> str:
        return f"calls/{self._name}/{self._number + later}/{last}"

    def _end(self, store: Any) -> str:
        return store.get(self.key("end")).decode() if store.check([self.key("end")]) else ""

    def _finish(self, store: Any, how: str) -> str:
        """Ends the call; if it had ended already, that way counts."""
        end: str = store.compare_set(self.key("end"), "", how).decode()
        return end

    def _error(self, store: Any, end: str) -> CommunicationError:
        what = f"rank {self.me}: {self._caller.what}"
        if end.startswith(_FAILED):
            return CommunicationError(f"{what}: {end.removeprefix(_FAILED)}")
        missing = [rank for rank in self.ranks if not store.check([self.key(rank)])]
        who = ", ".join(f"rank {rank} ({self._instead(store, rank)})" for rank in missing)
        return CommunicationError(
            f"{what}: {who or 'a rank'} did not come within {self._caller.timeout_s:g} s; all "
            f"ranks of the group must call {self._caller.what}"
        )

    def _instead(self, store: Any, rank: int) -> str:
        """What a rank that did not come does instead, as far as the store knows."""
        key = f"last/{rank}"
        if not store.check([key]):
            return "it has called nothing of zcomm"
        return f"its last call of zcomm was {store.get(key).decode()}"


class _UntilGivenUp:
    """A store that a meeting may use until its caller has given it up."""

    def __init__(self, store: Any, meeting: _Meeting) -> None:
        self._store, self._meeting = store, meeting

    def __getattr__(self, name: str) -> Any:
        if self._meeting.given_up:
            # Those who come now need not wait for this rank. Then this thread ends.
            self._store.compare_set(self._meeting.key("end"), "", _ABANDONED)
            sys.exit()
        return getattr(self._store, name)


def _counts() -> Counter[str]:
    return _calls.setdefault(dist.group.WORLD, Counter())


def tells_others(
    what: str, group_of: Callable[..., Any]
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorates a call of all ranks. If it raises before this rank meets the others, for instance
    because of an argument, they end at once instead of at their deadline."""

    def decorate(call: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(call)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            group = group_of(*args, **kwargs)
            before = _count(group)
            try:
                return call(*args, **kwargs)
            except CommunicationError:
                raise  # the others know
            except Exception as error:
                if _count(group) == before:
                    _tell(Caller(what, group, _TELL_S), error)
                raise

        return wrapper

    return decorate


def _count(group: Any) -> int:
    """The calls of a group so far; 0 for what is no group of this rank."""
    return _counts()[c10d.name_of(group)] if _is_member(group) else 0


def _is_member(group: Any) -> bool:
    return isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0


def _tell(caller: Caller, error: BaseException) -> None:
    if not _is_member(caller.group) or dist.get_world_size(caller.group) == 1:
        return
    meeting = _Meeting(caller)
    try:
        Store("").answer(lambda store: meeting.fail(store, error), caller.timeout_s)
    except StoreError:
        meeting.given_up = True  # the store is gone: the others find out by themselves


class Met(NamedTuple):
    """A name that all ranks share and none used before, and where each of them is.

    `grouped`: how they are grouped, if chunks make two hops.
    """

    name: str
    hosts: list[Host]
    grouped: Hosts | None

    @staticmethod
    def of(
        everyone: Sequence[Mapping[str, str]],
        hierarchy: Hierarchy | None,
        group: Any,
        rank: int,
        device: torch.device,
    ) -> "Met":
        """From what agree() returned, in the order of the group."""
        hosts = [Host.loads(one["host"]) for one in everyone]
        grouped = met_hosts(grouping(hierarchy, device), everyone, group, rank)
        return Met(everyone[0]["name"], hosts, grouped)


def meet(
    compared: Mapping[str, str],
    hierarchy: Hierarchy | None,
    caller: Caller,
    rank: int,
    device: torch.device,
) -> Met:
    """Refuses settings that are not the same on all ranks. All of them call it."""
    expect_fresh_store(caller.group)
    everyone = agree(compared, [caller], rank, announcement())
    return Met.of(everyone, hierarchy, caller.group, rank, device)


def announcement() -> dict[str, str]:
    """What this rank says of itself: its host, and a name that it proposes."""
    return {**announced(), "name": fresh_name()}


def grouping(hierarchy: Hierarchy | None, device: torch.device) -> Hierarchy | None:
    """Without a Hierarchy: on CPUs, by the hosts that are found; on GPUs, one hop."""
    return FOUND if hierarchy is None and device.type == "cpu" else hierarchy


def agree(
    compared: Mapping[str, str],
    callers: Sequence[Caller],
    rank: int,
    said: Mapping[str, str] | None = None,
) -> list[dict[str, str]]:
    """Refuses settings that differ; returns what each rank said besides.

    Ranks compare hashes, and send all settings only if those differ. With two callers, the groups
    of the second connect those of the first.
    """
    text = json.dumps(dict(compared), sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    everyone = everyones({**(said or {}), "settings": digest}, callers)
    if len({one["settings"] for one in everyone}) > 1:
        expect_same(everyones(dict(compared), callers), rank)
    return everyone


def everyones(mine: Any, callers: Sequence[Caller]) -> list[Any]:
    """What each rank says. The groups of a second caller connect those of the first."""
    found = [mine]
    for caller in callers:
        found = [one for theirs in caller.gather_json(found) for one in theirs]
    return found


def fresh_name() -> str:
    return uuid.uuid4().hex[:12]
