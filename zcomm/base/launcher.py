"""What a launcher's variables say about hosts. They are only compared with the hosts found."""

import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from zcomm.base.host import Host, labels

# The number of a rank's host: from torchrun, from Lightning and Ray, from Slurm.
NUMBERS = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")
COUNT = "LOCAL_WORLD_SIZE"  # how many ranks a rank's host has

Said = Mapping[str, str]


def said() -> dict[str, str]:
    """The variables of this rank."""
    return {name: os.environ[name] for name in (*NUMBERS, COUNT) if name in os.environ}


def contradiction(everyone: Sequence[Said], hosts: Sequence[Host], whole: bool) -> str:
    """The first thing that variables of ranks 0, 1, ... say and their hosts do not; or "".

    A variable that only some ranks have says nothing. `whole`: these are all ranks of the job, so
    that the number of ranks on a host can be compared, too.
    """
    for name in NUMBERS:
        numbers = [one[name] for one in everyone if name in one]
        if len(numbers) == len(everyone) and (found := _other_hosts(name, numbers, hosts)):
            return found
    return _other_count(everyone, hosts) if whole else ""


def _other_hosts(name: str, numbers: Sequence[str], hosts: Sequence[Host]) -> str:
    named = labels(hosts)
    for rank, (first, found) in enumerate(zip(_firsts(numbers), _firsts(hosts))):
        if first == found:
            continue
        if first < rank:
            where = f"{named[hosts[first]]} and {named[hosts[rank]]}"
            return f"{name} puts ranks {first} and {rank} on one host, but they are on {where}"
        where = named[hosts[rank]]
        return f"{name} puts ranks {found} and {rank} on different hosts, but both are on {where}"
    return ""


def _firsts(values: Sequence[Hashable]) -> list[int]:
    """For each rank, the first rank with the same value."""
    first: dict[Hashable, int] = {}
    return [first.setdefault(value, rank) for rank, value in enumerate(values)]


def _other_count(everyone: Sequence[Said], hosts: Sequence[Host]) -> str:
    found = Counter(hosts)
    for rank, (one, host) in enumerate(zip(everyone, hosts)):
        if one.get(COUNT, str(found[host])) != str(found[host]):
            where = f"its host {labels(hosts)[host]} has {found[host]} ranks"
            return f"{COUNT} is {one[COUNT]} on rank {rank}, but {where}"
    return ""
