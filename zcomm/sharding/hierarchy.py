"""Hierarchy: two hops, one inside each host and one between hosts; Hosts: which ranks share a host.

    hosts.ranks[h][l]    the rank with number l on host h

Each element crosses between hosts once, not once for each rank. What a rank owns is summed on every
other host by its *deputy* there, which then sends the host's sum. Where all hosts have as many
ranks, the deputy is the rank with the same number. A `column` is the ranks that exchange with each
other between hosts: those with the same number, modulo the fewest ranks that a host has.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch.distributed as dist

from zcomm.base import arguments, launcher
from zcomm.base.host import Host, labels, this_host
from zcomm.codecs import Codec, codec


@dataclass(frozen=True)
class Hierarchy:
    """Used in place of a codec: the sum over a host's ranks first, then one encoding.

    local    codec of the hop inside a host, which has no feedback
    across   codec of the hop between hosts, or a dict of patterns of parameter names and codecs
    hosts    the ranks of each host, [[0, 1], [2, 3]], or how many each has, as torchrun numbers
             them; None: those on which the ranks find themselves

    On CPUs a codec alone means Hierarchy("none", codec). With one host, or one rank on each, there
    is one hop: across. hosts=1 counts every rank as a host, so there is one hop, too.
    """

    local: str | Codec = "none"
    across: str | Codec | Mapping[str, str | Codec] = "lm4"
    hosts: int | Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "local", codec(self.local).spec)
        if codec(self.local).needs_feedback:
            raise ValueError(
                f"Hierarchy: expected a local codec that works without feedback, got "
                f"{self.local!r}; use 'none', 'bf16' or 'int8' inside a host"
            )
        if isinstance(self.across, Hierarchy):
            raise TypeError("Hierarchy: expected a codec or patterns for across, got a Hierarchy")
        object.__setattr__(self, "hosts", _checked_hosts(self.hosts))

    @property
    def local_codec(self) -> Codec:
        return codec(self.local)

    def __hash__(self) -> int:
        return hash((self.local, repr(self.across), self.hosts))

    def compared(self) -> str:
        """What must be the same on all ranks; `across` is compared as the codec."""
        return f"local={self.local!r}, hosts={self.hosts}"

    def given_to(self, rank: int) -> str | None:
        """The host that `hosts` gives a global rank, as messages call it; None if it has none."""
        if isinstance(self.hosts, Sequence):
            found = (h for h, row in enumerate(self.hosts) if rank in row)
            return next((f"hosts[{h}]" for h in found), None)
        assert self.hosts is not None
        return f"host {rank // self.hosts} of hosts={self.hosts}"


def announced() -> dict[str, str]:
    """What this rank says of its host to all others."""
    return {"host": this_host().dumps(), "launcher": json.dumps(launcher.said())}


def met_hosts(
    hierarchy: Hierarchy | None, everyone: Sequence[Mapping[str, str]], group: Any, rank: int
) -> Hosts | None:
    """The hosts of a group: those given, or those that its ranks announced; None: one hop."""
    if hierarchy is None:
        return None
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    if hierarchy.hosts is None:
        return _found_hosts(everyone, rank, len(members) == dist.get_world_size())
    given = [hierarchy.given_to(member) for member in members]
    if None in given:
        raise ValueError(
            f"rank {rank}: Hierarchy: expected hosts that list every rank of the group, got "
            f"{hierarchy.hosts}, without the group's rank {given.index(None)}; list global ranks"
        )
    return hosts_of([str(host) for host in given], rank)


def _found_hosts(everyone: Sequence[Mapping[str, str]], rank: int, whole: bool) -> Hosts | None:
    hosts = [Host.loads(one["host"]) for one in everyone]
    named = labels(hosts)
    said = [json.loads(one["launcher"]) for one in everyone]
    if rank == 0 and (found := launcher.contradiction(said, hosts, whole)):
        _warn(found, shortened(list(named.values())))
    return hosts_of([named[host] for host in hosts], rank)


@lru_cache(maxsize=8)
def _warn(contradiction: str, hosts: str) -> None:
    warnings.warn(
        f"zcomm: {contradiction}. The hierarchy goes by the hosts that were found: {hosts}. To use "
        "others, pass Hierarchy(hosts=[[0, 1], [2, 3]])",
        stacklevel=2,
    )


class Position(NamedTuple):
    """Where a rank is: its host, and its number there."""

    host: int
    local: int


class Hosts:
    """A table of ranks with at least two hosts, and several ranks on one; `rank` is this one."""

    def __init__(self, ranks: Sequence[Sequence[int]], rank: int) -> None:
        self.ranks = tuple(map(tuple, ranks))
        self.rank = rank
        self._positions = {
            r: Position(h, local) for h, row in enumerate(self.ranks) for local, r in enumerate(row)
        }
        self.host, self.local = self._positions[rank]
        self.neighbours = self.ranks[self.host]  # the ranks of this host, this one included
        # The ranks of each column, host by host, and where each host's begin among them.
        fewest = min(map(len, self.ranks))
        self._columns = [[row[c::fewest] for row in self.ranks] for c in range(fewest)]
        self._starts = [list(accumulate(map(len, rows), initial=0)) for rows in self._columns]
        self.column = tuple(r for row in self._columns[self._column_number(rank)] for r in row)
        self.owners = self.deputy_for(rank)  # whose deputy this rank is, itself included
        self.sources = self.deputies(rank)  # who is deputy for this rank, itself included
        self.is_alone = len(self.neighbours) == 1

    def __len__(self) -> int:
        return len(self.ranks)

    def _column_number(self, rank: int) -> int:
        return self.position(rank).local % len(self._columns)

    def position(self, rank: int) -> Position:
        return self._positions[rank]

    def deputy(self, owner: int, host: int) -> int:
        """The rank of a host that sums there what `owner` owns: itself on its own host. Elsewhere
        the ranks of its column take the owners of other hosts in turn."""
        home, local = self.position(owner)
        if host == home:
            return owner
        number = self._column_number(owner)
        row = self._columns[number][host]
        return row[(self._starts[number][home] + local // len(self._columns)) % len(row)]

    def deputies(self, owner: int) -> tuple[int, ...]:
        """Its deputy on each host, itself included: the ranks that send it their host's sum."""
        return tuple(self.deputy(owner, host) for host in range(len(self)))

    def deputy_for(self, rank: int) -> tuple[int, ...]:
        """The owners whose deputy on its host a rank is, itself included."""
        host = self.position(rank).host
        column = self._columns[self._column_number(rank)]
        return tuple(r for row in column for r in row if self.deputy(r, host) == rank)

    def __repr__(self) -> str:
        return repr([list(row) for row in self.ranks])


def hosts_of(names: Sequence[str], rank: int) -> Hosts | None:
    """The hosts of ranks 0, 1, ... by their names, in the order of their first ranks.

    None if there is but one host, or one rank on each: there is only one hop then.
    """
    table: dict[str, list[int]] = {}
    for r, name in enumerate(names):
        table.setdefault(name, []).append(r)
    if len(table) == 1 or len(table) == len(names):
        return None
    return Hosts(list(table.values()), rank)


def shortened(values: Sequence[object], most: int = 8) -> str:
    """A list for a message: a job may have a thousand ranks."""
    rest = [f"… ({len(values)} in all)"] if len(values) > most else []
    return ", ".join([*map(str, values[:most]), *rest])


def _checked_hosts(given: object) -> int | tuple[tuple[int, ...], ...] | None:
    if given is None:
        return None
    if isinstance(given, Sequence) and not isinstance(given, str):
        return _checked_table(given)
    return arguments.count(given, "hosts", least=1, remedy="; or lists of ranks: [[0, 1], [2, 3]]")


def _checked_table(given: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    for row in given:
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise TypeError(
                f"Hierarchy: expected a list of ranks for each host, as in [[0, 1], [2, 3]], got "
                f"{arguments.describe(row)}"
            )
    table = tuple(tuple(arguments.count(r, "a rank") for r in row) for row in given)  # type: ignore[attr-defined]
    ranks = [r for row in table for r in row]
    if len(set(ranks)) != len(ranks):
        twice = next(r for r in ranks if ranks.count(r) > 1)
        raise ValueError(f"Hierarchy: expected each rank on one host, got rank {twice} twice")
    return table


# Where a rank gives a codec alone: exact inside the hosts on which the ranks find themselves.
FOUND = Hierarchy()
