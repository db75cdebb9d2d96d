"""Faults between two hosts, each a network namespace: ranks end in time and name the culprit.

Rank 0, which keeps the store, has a host of its own; ranks 1 and 2 share the other one. A short
form runs by default; ZCOMM_FAULTS=all (`make test-faults`) runs everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zcomm.launch import hosts

SCRIPT = Path(__file__).parents[1] / "support" / "fault_training.py"
TIMEOUT_S = 5.0
LATE_S = 2.0
HOST_OF = (0, 1, 1)
STORE = r"the store, which rank 0 keeps at 198\.18\.0\.1:\d+,"
FAULTS = os.environ.get("ZCOMM_FAULTS", "short")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


class Rank:
    """A process on one of the hosts, and what it says."""

    def __init__(self, number: int, prefix: list[str], port: int, args: list[str]) -> None:
        env = {"RANK": number, "WORLD_SIZE": len(HOST_OF), "MASTER_ADDR": "198.18.0.1"}
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        env |= {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": hosts.INTERFACE, "OMP_NUM_THREADS": 1}
        self.number = number
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it stays open)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(SCRIPT), *args],
            env={**os.environ, **{key: str(value) for key, value in env.items()}},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith("[Gloo]"):  # torch 2.9 prints its connections
                self._said.put(json.loads(line))

    def says(self, key: str, least: int = 0, timeout_s: float = 60.0) -> dict[str, Any]:
        """Waits for a line with this key, and a value of at least `least` if it is a number."""
        deadline = time.monotonic() + timeout_s
        while True:
            said = self._next(deadline, key)
            if key in said and not (isinstance(said[key], int) and said[key] < least):
                return said

    def _next(self, deadline: float, key: str) -> dict[str, Any]:
        try:
            return self._said.get(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            self._errors.seek(0)
            pytest.fail(f"rank {self.number} did not say {key!r}: {self._errors.read()}")

    def go(self, tries: int = 1) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{tries}\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """`ip netns exec` becomes the rank itself, so this is the rank's process."""
        self.process.send_signal(number)


class Network:
    """The two hosts, and the ranks on them."""

    def __init__(self, prefixes: list[list[str]]) -> None:
        self._prefixes = prefixes
        self._bridge = f"zcomm-{os.getpid()}-bridge"
        self._port = 29500
        self.ranks: list[Rank] = []

    @contextlib.contextmanager
    def training(self, steps: int = 100_000, meet: bool = False) -> Iterator[list[Rank]]:
        self._port += 1  # the last one may still be in TIME_WAIT
        args = [str(TIMEOUT_S), str(steps), str(meet)]
        self.ranks = [
            Rank(number, self._prefixes[host], self._port, args)
            for number, host in enumerate(HOST_OF)
        ]
        try:
            yield self.ranks
        finally:
            for rank in self.ranks:
                rank.process.kill()
                rank.process.wait()

    def cut(self, host: int) -> None:
        """As if its cable were pulled at the switch: its own interface stays up."""
        hosts.ip(f"-n {self._bridge} link set port{host} down")

    def mend(self, host: int) -> None:
        hosts.ip(f"-n {self._bridge} link set port{host} up")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        with hosts.network(2, "1gbit") as prefixes:
            yield Network(prefixes)
    except hosts.NoHosts as error:
        pytest.skip(str(error))


def expect_named(
    ranks: list[Rank], named: dict[int, str], happened_at: float, timeout_s: float = TIMEOUT_S
) -> None:
    """Each of these ranks fails in time, with an error that starts with the culprit; its process
    ends soon after, without help."""
    for number, culprit in named.items():
        said = ranks[number].says("text", timeout_s=timeout_s + 30)
        print(f"rank {number}: {said['failed_at'] - happened_at:.1f} s: {said['text']}")
        assert said["error"] == "CommunicationError", said
        assert said["failed_at"] - happened_at < timeout_s + LATE_S, said
        assert re.match(rf"rank {number}: (\w+: )?{culprit}", said["text"]), said["text"]
    for number in named:
        assert ranks[number].process.wait(timeout=20) == 1


def silent(*ranks: int) -> str:
    names = ", ".join(f"rank {rank}" for rank in ranks)
    return rf"{names} died or stopped \(no answer for \d+ s\) in bucket \d of step \d+"


def lost(victim: int) -> str:
    """Who is named for a rank that is gone; with rank 0 the store may be."""
    return silent(victim) if victim else rf"({silent(0)}|{STORE} (does not answer|failed: ))"


Fault = Callable[[Network, list[Rank]], dict[int, str]]


def after_signal(victim: int, number: int) -> Fault:
    def fault(network: Network, ranks: list[Rank]) -> dict[int, str]:
        ranks[victim].signal(number)
        return {rank: lost(victim) for rank in range(3) if rank != victim}

    return fault


def after_cut(host: int) -> Fault:
    def fault(network: Network, ranks: list[Rank]) -> dict[int, str]:
        network.cut(host)
        return {0: silent(1, 2), 1: lost(0), 2: lost(0)}

    return fault


def after_loss_of_the_stores_host(network: Network, ranks: list[Rank]) -> dict[int, str]:
    """A crash of the whole host: no packet says so."""
    network.cut(0)
    ranks[0].signal(signal.SIGKILL)
    return {1: lost(0), 2: lost(0)}


SHORT: dict[str, Fault] = {
    "rank 0 stopped": after_signal(0, signal.SIGSTOP),
    "link cut": after_cut(1),
}
LONG: dict[str, Fault] = {
    "rank 0 killed": after_signal(0, signal.SIGKILL),
    "rank 1 killed": after_signal(1, signal.SIGKILL),
    "rank 2 killed": after_signal(2, signal.SIGKILL),
    "rank 1 stopped": after_signal(1, signal.SIGSTOP),
    "rank 2 stopped": after_signal(2, signal.SIGSTOP),
    "link of the store cut": after_cut(0),
    "host of the store lost": after_loss_of_the_stores_host,
}
CHOSEN = {**SHORT, **LONG} if FAULTS == "all" else SHORT
every_fault = pytest.mark.skipif(FAULTS != "all", reason="make test-faults runs it")


@pytest.fixture
def mended(network: Network) -> Iterator[Network]:
    yield network
    for host in range(2):
        network.mend(host)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_fault_in_training_is_named_in_time(mended: Network, name: str) -> None:
    with mended.training() as ranks:
        for rank in ranks:
            rank.says("step", least=5)
        named = CHOSEN[name](mended, ranks)
        expect_named(ranks, named, time.monotonic())


@every_fault
@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_fault_before_the_ranks_meet_is_named_in_time(
    mended: Network, victim: int, number: int
) -> None:
    with mended.training(meet=True) as ranks:
        for rank in ranks:
            rank.says("step")
        ranks[victim].signal(number)
        started = time.monotonic()
        others = [rank for rank in ranks if rank.number != victim]
        for rank in others:
            rank.go()
        absent = rf"rank {victim} \(it has called nothing of zcomm\) did not come within 5 s"
        named = {rank.number: absent if victim else STORE for rank in others}
        expect_named(ranks, named, started)


@every_fault
def test_a_retry_works_when_the_store_answers_again(mended: Network) -> None:
    with mended.training(meet=True, steps=3) as ranks:
        for rank in ranks:
            rank.says("step")
        ranks[0].signal(signal.SIGSTOP)
        for rank in ranks[1:]:
            rank.go(tries=2)
        for rank in ranks[1:]:
            assert re.match(rf"rank \d: compress: {STORE}", rank.says("text")["text"])
        ranks[0].signal(signal.SIGCONT)
        time.sleep(1)
        for rank in ranks:
            rank.go()
        assert len({rank.says("digest")["digest"] for rank in ranks}) == 1


@pytest.fixture(scope="module")
def undisturbed(network: Network) -> list[str]:
    with network.training(steps=60) as ranks:
        return [rank.says("digest")["digest"] for rank in ranks]


@every_fault
@pytest.mark.parametrize("host", range(2))
def test_a_link_that_is_down_for_less_than_the_timeout_changes_no_bit(
    mended: Network, undisturbed: list[str], host: int
) -> None:
    with mended.training(steps=60) as ranks:
        for rank in ranks:
            rank.says("step", least=5)
        mended.cut(host)
        time.sleep(1.5)
        mended.mend(host)
        digests = [rank.says("digest")["digest"] for rank in ranks]
        assert digests == undisturbed
        assert len(set(digests)) == 1
