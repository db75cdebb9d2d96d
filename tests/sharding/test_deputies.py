"""Which rank of each host sums what a rank of another host owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations_with_replacement, product

from zcomm.sharding.hierarchy import Hosts

Table = list[list[int]]


def in_blocks(counts: Sequence[int]) -> Table:
    """Ranks numbered host by host, as by torchrun."""
    ranks = iter(range(sum(counts)))
    return [[next(ranks) for _ in range(count)] for count in counts]


def in_turns(counts: Sequence[int]) -> Table:
    """Ranks numbered round-robin, as by `mpirun --map-by node`."""
    table: Table = [[] for _ in counts]
    turns = [host for turn in range(max(counts)) for host, n in enumerate(counts) if turn < n]
    for rank, host in enumerate(turns):
        table[host].append(rank)
    return table


def counts_of_hosts() -> Iterator[tuple[int, ...]]:
    """Two, three and five hosts of one to four ranks."""
    for hosts in (2, 3):
        yield from product(range(1, 5), repeat=hosts)
    for counts in combinations_with_replacement(range(1, 5), 5):
        yield counts
        yield counts[::-2] + counts[1::2]  # not in order of their size


@cache
def worlds() -> list[list[Hosts]]:
    """What each rank knows, for every table with two hops."""
    every = (c for c in counts_of_hosts() if max(c) > 1)
    tables = [number(counts) for counts in every for number in (in_blocks, in_turns)]
    return [[Hosts(table, rank) for rank in range(sum(map(len, table)))] for table in tables]


def test_deputies_on_a_host_share_all_owners_and_each_owner_has_one() -> None:
    for world in worlds():
        for row in world[0].ranks:
            owners = [owner for rank in row for owner in world[rank].owners]
            assert sorted(owners) == list(range(len(world))), world[0]


def test_a_rank_is_its_own_deputy() -> None:
    for world in worlds():
        for rank, hosts in enumerate(world):
            assert hosts.deputy(rank, hosts.host) == rank
            assert rank in hosts.owners
            assert rank in hosts.sources
            others = set(hosts.neighbours) - {rank}
            assert not others & {*hosts.owners, *hosts.sources}, (rank, hosts)


def test_an_owners_deputies_are_the_ranks_that_it_is_an_owner_of() -> None:
    for world in worlds():
        for rank, hosts in enumerate(world):
            for owner in range(len(world)):
                is_deputy = rank == hosts.deputy(owner, hosts.host)
                assert (owner in hosts.deputy_for(rank)) == is_deputy, (rank, owner, hosts)
                assert (rank in world[owner].sources) == is_deputy


def test_all_ranks_know_the_same_deputies() -> None:
    for world in worlds():
        for rank, hosts in enumerate(world):
            assert hosts.owners == world[0].deputy_for(rank)
            assert hosts.sources == world[-1].deputies(rank)
            assert [hosts.position(r).host for r in hosts.sources] == list(range(len(hosts)))


def test_ranks_exchange_between_hosts_only_with_those_of_their_column() -> None:
    for world in worlds():
        fewest = min(map(len, world[0].ranks))
        columns = {tuple(sorted(hosts.column)) for hosts in world}
        assert len(columns) == fewest
        assert sorted(r for column in columns for r in column) == list(range(len(world)))
        for hosts in world:
            assert {*hosts.owners, *hosts.sources} <= set(hosts.column), hosts


def test_ranks_of_a_column_on_one_host_have_as_many_owners_but_one() -> None:
    for world in worlds():
        for hosts in world:
            together = set(hosts.column) & set(hosts.neighbours)
            loads = [len(world[rank].owners) for rank in together]
            assert max(loads) - min(loads) <= 1, (sorted(together), hosts)


def test_no_rank_with_neighbours_is_deputy_for_more_than_two_thirds_of_all() -> None:
    """What a slot of shared memory has room for: zcomm.transport.shared_memory.ring."""
    for world in worlds():
        for hosts in world:
            assert hosts.is_alone or 3 * len(hosts.owners) <= 2 * len(world), hosts


def test_on_hosts_of_equal_size_a_deputy_has_the_number_of_its_owner() -> None:
    equal = [world for world in worlds() if len({len(row) for row in world[0].ranks}) == 1]
    assert len(equal) > 10
    for world in equal:
        for rank, hosts in enumerate(world):
            same_number = tuple(row[hosts.local] for row in hosts.ranks)
            assert hosts.sources == hosts.owners == hosts.column == same_number, (rank, hosts)


def test_a_rank_alone_on_its_host_is_deputy_for_all() -> None:
    hosts = Hosts([[0, 1, 3], [2]], 2)
    assert hosts.is_alone
    assert hosts.owners == (0, 1, 3, 2)
    assert [Hosts([[0, 1, 3], [2]], rank).owners for rank in (0, 1, 3)] == [(0, 2), (1,), (3,)]
