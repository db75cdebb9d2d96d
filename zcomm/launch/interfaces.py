"""The network interfaces of this machine, and the one gloo would use."""

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from zcomm.report.finding import NOTE, OK, PROBLEM, Finding

IFNAME_VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915
_NET = Path("/sys/class/net")
_IPV6_TABLE = Path("/proc/net/if_inet6")


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]
    is_up: bool
    mbit_per_s: int | None  # None if unknown, as for most virtual interfaces

    def speed(self) -> str:
        if self.name == LOOPBACK:
            return "this machine only"
        if self.mbit_per_s is None:
            return "speed unknown"
        gbit = self.mbit_per_s / 1000
        return f"{gbit:g} Gbit/s" if gbit >= 1 else f"{self.mbit_per_s} Mbit/s"


@dataclass(frozen=True)
class Choice:
    """The interface gloo would use, or None if unknown, and why."""

    interface: str | None
    why: str
    problem: bool = False


def list_interfaces() -> list[Interface]:
    ipv6 = _ipv6_addresses()
    return [
        Interface(name, (*_ipv4_address(name), *ipv6.get(name, ())), _is_up(name), _speed(name))
        for _, name in socket.if_nameindex()
    ]


def _ipv4_address(name: str) -> list[str]:
    """Only the first; an interface can have more."""
    if sys.platform != "linux":
        return []
    import fcntl

    request = struct.pack("256s", name.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        return [socket.inet_ntoa(fcntl.ioctl(s.fileno(), _SIOCGIFADDR, request)[20:24])]
    return []


def _ipv6_addresses() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in _IPV6_TABLE.read_text().splitlines() if _IPV6_TABLE.exists() else []:
        digits, *_, name = line.split()
        found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def _is_up(name: str) -> bool:
    """The flag IFF_UP, the only state loopback has."""
    try:
        return bool(int((_NET / name / "flags").read_text(), 16) & 1)
    except (OSError, ValueError):
        return True


def _speed(name: str) -> int | None:
    try:
        mbit = int((_NET / name / "speed").read_text())
    except (OSError, ValueError):
        return None
    return mbit if mbit > 0 else None


def gloo_choice(interfaces: list[Interface]) -> Choice:
    """As gloo chooses: the one it is told, else that of the host's name, else loopback."""
    told = os.environ.get(IFNAME_VARIABLE, "")
    if told:
        return _told(told.split(","), interfaces)
    host = socket.gethostname()
    address = _usable_address(host)
    if address is None:
        why = f"this host's name, {host}, does not resolve to an address of this machine"
        return Choice(LOOPBACK, why)
    return Choice(_owner(address, interfaces), f"this host's name, {host}, resolves to {address}")


def _told(names: list[str], interfaces: list[Interface]) -> Choice:
    with_address = {i.name for i in interfaces if i.addresses}
    for name in names:
        if name not in with_address:
            known = ", ".join(sorted(with_address))
            why = f"{IFNAME_VARIABLE} names {name!r}; interfaces with an address: {known}"
            return Choice(None, why, problem=True)
    return Choice(names[0], f"{IFNAME_VARIABLE} says so")


def _usable_address(host: str) -> str | None:
    """The name's first address that a socket can bind to."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as s:
            s.bind(address)
            return str(address[0])
    return None


def _owner(address: str, interfaces: list[Interface]) -> str | None:
    if ipaddress.ip_address(address).is_loopback:
        return LOOPBACK
    return next((i.name for i in interfaces if address in i.addresses), None)


def check() -> Finding:
    interfaces = list_interfaces()
    choice = gloo_choice(interfaces)
    details = {
        "interfaces": [asdict(i) for i in interfaces],
        "gloo_interface": choice.interface,
        "why": choice.why,
    }
    lines = [*_table(interfaces, choice.interface), *_absent(interfaces)]
    if choice.problem:
        lines.append(choice.why)
        remedy = f"Set {IFNAME_VARIABLE} to an interface that has an address, or unset it."
        return Finding(PROBLEM, lines, remedy, details)
    lines.append(f"gloo would use {choice.interface or 'an unknown interface'}: {choice.why}")
    others = [i.name for i in interfaces if i.is_up and i.addresses and i.name != LOOPBACK]
    if choice.interface == LOOPBACK and others:
        lines.append(
            "That is enough for ranks on this machine. For several machines, set "
            f"{IFNAME_VARIABLE}={others[0]} on each."
        )
        return Finding(NOTE, lines, details=details)
    return Finding(OK, lines, details=details)


def _table(interfaces: list[Interface], chosen: str | None) -> list[str]:
    """One line per interface, with its first address, the one gloo takes."""
    rows = [i for i in interfaces if i.is_up and i.addresses]
    name_width = max((len(i.name) for i in rows), default=0)
    address_width = max((len(i.addresses[0]) for i in rows), default=0)
    return [
        f"{i.name:<{name_width}}  {i.addresses[0]:<{address_width}}  {i.speed()}"
        + (" (gloo)" if i.name == chosen else "")
        for i in rows
    ]


def _absent(interfaces: list[Interface]) -> list[str]:
    names = [i.name for i in interfaces if not (i.is_up and i.addresses)]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return [f"down or without an address: {shown}"] if names else []
