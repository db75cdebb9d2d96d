"""Hosts: which ranks share a host, for collectives of two hops. Pure arithmetic.

    hosts.ranks[h][l]    the rank with number l inside host h

A rank exchanges with the `column` of ranks that have its number on the other hosts, and with the
ranks of its own host. So what crosses between hosts is each element once, not once for each rank.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Position(NamedTuple):
    """Where a rank is: its host, and its number there."""

    host: int
    local: int


class Hosts:
    """A table of ranks with at least two hosts and two ranks on each; `rank` is this one."""

    def __init__(self, ranks: Sequence[Sequence[int]], rank: int) -> None:
        self.ranks = tuple(map(tuple, ranks))
        self.rank = rank
        self._positions = {
            r: Position(h, local) for h, row in enumerate(self.ranks) for local, r in enumerate(row)
        }
        self.host, self.local = self._positions[rank]

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks of this host, this one among them."""
        return self.ranks[self.host]

    @property
    def column(self) -> tuple[int, ...]:
        """The rank of each host that has this one's number."""
        return self.column_of(self.rank)

    def column_of(self, rank: int) -> tuple[int, ...]:
        return tuple(row[self.position(rank).local] for row in self.ranks)

    def position(self, rank: int) -> Position:
        return self._positions[rank]

    def __repr__(self) -> str:
        return repr([list(row) for row in self.ranks])


def hosts_of(names: Sequence[str], rank: int, counts: Sequence[str] = ()) -> Hosts | None:
    """The hosts of ranks 0, 1, ... by their names, in the order of their first ranks.

    None if there is but one host, or one rank on each: there is only one hop then. `counts` is what
    each rank believes to be the number of ranks on its host.
    """
    table: dict[str, list[int]] = {}
    for r, name in enumerate(names):
        table.setdefault(name, []).append(r)
    if len({len(row) for row in table.values()}) > 1 or len(set(counts)) > 1:
        raise ValueError(
            f"rank {rank}: Hierarchy: expected the same number of ranks on every host, got "
            f"{_shown(table, counts)}; start the same number on each, or use one hop: codec='lm4'"
        )
    if len(table) == 1 or len(table) == len(names):
        return None
    return Hosts(list(table.values()), rank)


def _shown(table: Mapping[str, Sequence[int]], counts: Sequence[str]) -> str:
    if len(set(map(len, table.values()))) > 1:
        return ", ".join(f"{len(row)} on host {name}" for name, row in table.items())
    return "LOCAL_WORLD_SIZE " + ", ".join(f"{n} on rank {r}" for r, n in enumerate(counts))
