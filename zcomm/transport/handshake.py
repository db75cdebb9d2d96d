"""A meeting of all ranks before their first bytes: the same settings, a name, and their hosts."""

from collections.abc import Mapping
from typing import Any

from zcomm.sharding.hierarchy import ANNOUNCED, Hierarchy, Hosts, announced, met_hosts
from zcomm.sharding.settings import expect_same
from zcomm.transport.channels import exchange
from zcomm.transport.restarts import expect_fresh_store


def meet(
    compared: Mapping[str, str], hierarchy: Hierarchy | None, group: Any, rank: int
) -> tuple[str, Hosts | None]:
    """A name that all ranks share and none used before, and where each of them is.

    Refuses settings that are not the same on all ranks. All of them call it.
    """
    expect_fresh_store(group)
    everyone, name = exchange({**compared, **announced()}, group)
    settings = [{k: v for k, v in one.items() if k not in ANNOUNCED} for one in everyone]
    expect_same(settings, rank)
    return name, met_hosts(hierarchy, everyone, group, rank)
