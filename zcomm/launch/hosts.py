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
from collections.abc import Callable, Iterator
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


class NoHosts(UsageError):
    """This machine cannot emulate hosts; the message says why."""

    def __init__(self, why: str) -> None:
        super().__init__(f"this machine cannot emulate hosts: {why}")
        self.why = why


def run(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    hosts: int | None = None,
    rate: str | None = None,
    timeout_s: float = 3600.0,
) -> list[Any]:
    """Runs `fn(rank, world_size, *args)` on each rank and returns the results.

    Without `hosts` the ranks are on loopback. `rate` is that of each host's link, such as 1gbit.
    """
    with world(world_size, hosts, rate) as started:
        return started.run(fn, *args, timeout_s=timeout_s)


@contextlib.contextmanager
def world(world_size: int, hosts: int | None, rate: str | None) -> Iterator[World]:
    """Ranks, spread evenly over `hosts` and numbered as by torchrun; without, on loopback."""
    if (hosts is None) != (rate is None):
        raise ValueError(f"expected both hosts and a rate, or neither, got {hosts} and {rate}")
    if world_size % (hosts or 1):
        raise ValueError(f"expected a multiple of {hosts} hosts as ranks, got {world_size}")
    each = world_size // (hosts or 1)
    with ended_by_signals(), network(hosts, rate) as prefixes:
        interface = INTERFACE if hosts else LOOPBACK
        env = {"GLOO_SOCKET_IFNAME": interface, "LOCAL_WORLD_SIZE": str(each)}
        of_ranks = [prefix for prefix in prefixes for _ in range(each)]
        with World(world_size, group_timeout_s=300, env=env, prefixes=of_ranks) as started:
            yield started


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
