"""Counters: the totals of an engine, and the Stats that a user sees."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from zcomm.torch_private.autograd import Range


@dataclass
class Counters:
    """Totals since the engine started."""

    raw_bytes: int = 0
    wire_bytes: int = 0
    shared_bytes: int = 0
    encode_s: float = 0.0
    wait_s: float = 0.0
    decode_s: float = 0.0

    def add_shared(self, nbytes: int) -> None:
        """Bytes that peers read in shared memory."""
        self.wire_bytes += nbytes
        self.shared_bytes += nbytes

    @contextmanager
    def exchange(self) -> Iterator["Exchange"]:
        """Adds the time of an exchange in shared memory, which native code runs as a whole."""
        started, parts = perf_counter(), Exchange()
        try:
            with Range("zcomm::exchange"):
                yield parts
        finally:
            self.encode_s += parts.encode_s
            self.decode_s += parts.decode_s
            self.wait_s += perf_counter() - started - parts.encode_s - parts.decode_s

    @contextmanager
    def time(self, name: str, what: str) -> Iterator[None]:
        """Adds the time that it takes; torch.profiler sees it as zcomm::`what`."""
        started = perf_counter()
        try:
            with Range(f"zcomm::{what}"):
                yield
        finally:
            setattr(self, name, getattr(self, name) + perf_counter() - started)


class Exchange:
    """The parts of an exchange that a rank spends on encoding and decoding; the rest it waits."""

    def __init__(self) -> None:
        self.encode_s = self.decode_s = 0.0

    def add(self, encode_s: float, decode_s: float) -> None:
        self.encode_s += encode_s
        self.decode_s += decode_s


@dataclass(frozen=True)
class Stats:
    """Totals of this rank since the hook was registered; divide by `steps` for one step.

    `raw_bytes` is what an uncompressed all-reduce of the same gradients would have sent, and
    `wire_bytes` what was sent; of that, `shared_bytes` went through memory that the ranks of a host
    share. encode_s, wait_s and decode_s are of the engine, which works beside backward;
    `exposed_s` is how long backward() had to wait for it at its end. In shared memory, decode_s has
    also the second encoding, that of sums. On a CUDA device these are the times of the host, which
    issues work and does not wait for it.
    """

    steps: int
    raw_bytes: int
    wire_bytes: int
    shared_bytes: int
    encode_s: float
    wait_s: float
    decode_s: float
    exposed_s: float

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent; 1 if none were."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else 1.0
