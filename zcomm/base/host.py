"""What a host is, for everything that asks whether two ranks share one.

    host = its name + the boot id of its kernel + its network namespace

So containers on one machine are separate hosts if each has a network of its own, and one host if
they share a network and a name.
"""

import json
import socket
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

BOOT = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


class Host(NamedTuple):
    """Where a process runs. Parts that a system does not have (only Linux has all) are empty."""

    name: str
    boot: str
    network: str

    def dumps(self) -> str:
        return json.dumps(self)

    @staticmethod
    def loads(text: str) -> "Host":
        return Host(*json.loads(text))


def this_host() -> Host:
    boot = BOOT.read_text().strip() if BOOT.exists() else ""
    network = str(NETWORK.stat().st_ino) if NETWORK.exists() else ""
    return Host(socket.gethostname(), boot, network)


def labels(hosts: Iterable[Host]) -> dict[Host, str]:
    """What messages call each host: its name; what else it takes to tell it from its namesakes."""
    unique = dict.fromkeys(hosts)
    namesakes = Counter(host.name for host in unique)
    return {
        host: host.name
        if namesakes[host.name] == 1
        else f"{host.name} (boot {host.boot[:8]}, network {host.network})"
        for host in unique
    }
