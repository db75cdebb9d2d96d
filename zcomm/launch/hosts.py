"""Local ranks: all on loopback, or on emulated hosts behind slow links.

A host is a network namespace with one interface, `eth0`. Its link ends at a bridge in another
namespace, and both ends are limited to the given rate. The machine's own network does not change.
All namespaces are removed at the end, also after Ctrl-C, SIGTERM or an error; if a run is killed,
the next one removes them.

Hosts need root (CAP_NET_ADMIN, CAP_SYS_ADMIN) and `ip` and `tc` (Debian package: iproute2).
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zcomm.launch.ranks import World
from zcomm.report.units import parse_rate
from zcomm.report.usage import UsageError

INTERFACE = "eth0"
LOOPBACK = "lo"
# The address range for benchmarks (RFC 2544).
ADDRESS = "198.18.0.{}/15"
# The burst holds a few of TCP's packets of up to 64 KiB.
SHAPE = "burst 256kb latency 100ms"
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


# How many hosts share the ranks evenly, or how many ranks each host has; None: all on loopback.
Spread = int | Sequence[int] | None


class NoHosts(UsageError):
    """This machine cannot emulate hosts; the message says why."""

    def __init__(self, why: str) -> None:
        super().__init__(f"this machine cannot emulate hosts: {why}")
        self.why = why


def run(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    hosts: Spread = None,
    rate: str | None = None,
    timeout_s: float = 3600.0,
) -> list[Any]:
    """Runs `fn(rank, world_size, *args)` on each rank and returns the results.

    `hosts` is how many there are, or how many ranks each has, as in (3, 1); without, the ranks are
    on loopback. `rate` is that of each host's link, such as 1gbit.
    """
    with world(world_size, hosts, rate) as started:
        return started.run(fn, *args, timeout_s=timeout_s)


@contextlib.contextmanager
def world(world_size: int, hosts: Spread, rate: str | None) -> Iterator[World]:
    """Ranks on hosts, numbered host by host as by torchrun; without `hosts`, on loopback."""
    if (hosts is None) != (rate is None):
        raise ValueError(f"expected both hosts and a rate, or neither, got {hosts} and {rate}")
    counts = ranks_of_hosts(world_size, hosts)
    with ended_by_signals(), network(None if hosts is None else len(counts), rate) as prefixes:
        env = {"GLOO_SOCKET_IFNAME": LOOPBACK if hosts is None else INTERFACE}
        of_ranks = [
            [*prefix, "env", f"LOCAL_WORLD_SIZE={count}"]
            for prefix, count in zip(prefixes or [[]], counts)
            for _ in range(count)
        ]
        with World(world_size, group_timeout_s=300, env=env, prefixes=of_ranks) as started:
            yield started


def ranks_of_hosts(world_size: int, hosts: Spread) -> list[int]:
    """How many ranks each host has."""
    if hosts is None or isinstance(hosts, int):
        count = 1 if hosts is None else hosts
        if count < 1 or world_size % count:
            raise ValueError(f"expected a multiple of {hosts} hosts as ranks, got {world_size}")
        return [world_size // count] * count
    if sum(hosts) != world_size or min(hosts) < 1:
        raise ValueError(f"expected hosts that have {world_size} ranks in all, got {hosts}")
    return list(hosts)


def sent_bytes() -> float:
    """The bytes that have left this rank's interface so far, headers included.

    Ranks that share an interface get their mean. Loopback counts everything sent there. What the
    ranks of a host send to each other does not leave it.
    """
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    sent = int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())
    return sent / int(os.environ["LOCAL_WORLD_SIZE"])


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into an exception, so that `finally` runs as after Ctrl-C."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def network(hosts: int | None, rate: str | None) -> Iterator[list[list[str]]]:
    """The command prefix that puts a rank on each host."""
    if hosts is None or rate is None:
        yield []
        return
    require_tools()
    remove_namespaces(lambda pid: not Path(f"/proc/{pid}").exists())  # of a run that was killed
    names = [f"zcomm-{os.getpid()}-{host}" for host in range(hosts)]
    try:
        connect(names, f"zcomm-{os.getpid()}-bridge", rate)
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        with undisturbed():
            remove_namespaces(lambda pid: pid == os.getpid())


def connect(names: list[str], bridge: str, rate: str) -> None:
    ip(f"netns add {bridge}")
    ip(f"-n {bridge} link add bridge type bridge")
    ip(f"-n {bridge} link set bridge up")
    for host, name in enumerate(names):
        port = f"port{host}"
        ip(f"netns add {name}")
        ip(f"link add {INTERFACE} netns {name} type veth peer name {port} netns {bridge}")
        ip(f"-n {bridge} link set {port} master bridge up")
        ip(f"-n {name} address add {ADDRESS.format(host + 1)} dev {INTERFACE}")
        ip(f"-n {name} link set {INTERFACE} up")
        ip(f"-n {name} link set lo up")
        bits = f"{parse_rate(rate):.0f}bit"  # tc takes 1gbit/s for an error, and 1gbps for bytes
        for namespace, device in ((name, INTERFACE), (bridge, port)):
            command(f"tc -n {namespace} qdisc add dev {device} root tbf rate {bits} {SHAPE}")


def remove_namespaces(chosen: Callable[[int], bool]) -> None:
    """Removes zcomm's namespaces, chosen by the process id in their names, and their links."""
    for name, pid in re.findall(r"^(zcomm-(\d+)-\w+)", ip("netns list"), re.MULTILINE):
        if chosen(int(pid)):
            ip(f"netns delete {name}")


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Delays signals, so that a second Ctrl-C does not leave half a network behind."""
    signals = (signal.SIGINT, *ENDING_SIGNALS)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def require_tools() -> None:
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if missing:
        raise NoHosts(f"{' and '.join(missing)} not found (Debian: apt-get install iproute2)")
    if os.geteuid() != 0:
        raise NoHosts("network namespaces need root")


def ip(arguments: str) -> str:
    return command(f"ip {arguments}")


def command(line: str) -> str:
    done = subprocess.run(line.split(), capture_output=True, text=True)
    if done.returncode:
        raise NoHosts(f"`{line}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
