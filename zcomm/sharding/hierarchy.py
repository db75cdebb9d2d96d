"""Hierarchy: two hops, one inside each host and one between hosts."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from zcomm.base import arguments
from zcomm.codecs import Codec, codec
from zcomm.sharding.hosts import Hosts, hosts_of

_NOWHERE = "?"


@dataclass(frozen=True)
class Hierarchy:
    """Used in place of a codec: the sum over a host's ranks first, then one encoding.

    local    codec of the hop inside a host, which has no feedback
    across   codec of the hop between hosts, or a dict of patterns of parameter names and codecs
    hosts    the ranks of each host, [[0, 1], [2, 3]], or how many each has, as torchrun numbers
             them; None: LOCAL_WORLD_SIZE, which torchrun sets

    All hosts must have as many ranks. With one host, or one rank on each, there is one hop: across.
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

    def announced(self, group: Any, rank: int) -> dict[str, str]:
        """What this rank says of its host: its name, and how many ranks it believes to be there."""
        mine = dist.get_process_group_ranks(group or dist.group.WORLD)[rank]
        if isinstance(self.hosts, Sequence):
            return {"host": _host_in(self.hosts, mine), "host_ranks": ""}
        count = _local_world_size(rank) if self.hosts is None else self.hosts
        return {"host": str(mine // count), "host_ranks": str(count)}


ANNOUNCED = ("host", "host_ranks")  # not compared


def met_hosts(
    hierarchy: Hierarchy | None, everyone: Sequence[Mapping[str, str]], rank: int
) -> Hosts | None:
    """The hosts of a group, from what its ranks announced."""
    if hierarchy is None:
        return None
    names = [one["host"] for one in everyone]
    if _NOWHERE in names:
        raise ValueError(
            f"rank {rank}: Hierarchy: expected hosts that list every rank of the group, got "
            f"{hierarchy.hosts}, without the group's rank {names.index(_NOWHERE)}; list "
            "global ranks"
        )
    counts = [one["host_ranks"] for one in everyone]
    return hosts_of(names, rank, counts)


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


def _host_in(table: Sequence[Sequence[int]], rank: int) -> str:
    return next((str(h) for h, row in enumerate(table) if rank in row), _NOWHERE)


def _local_world_size(rank: int) -> int:
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not given.isdigit() or int(given) < 1:
        raise ValueError(
            f"rank {rank}: Hierarchy: expected LOCAL_WORLD_SIZE, the number of ranks on this host, "
            f"in the environment, got {given!r}; start with torchrun, or pass hosts="
        )
    return int(given)
