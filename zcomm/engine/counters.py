"""Counters: the totals of an engine, and its ranges in torch.profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from zcomm.torch_private.profiler import Range


@dataclass
class Counters:
    """Totals since the engine started."""

    raw_bytes: int = 0
    wire_bytes: int = 0
    encode_s: float = 0.0
    wait_s: float = 0.0
    decode_s: float = 0.0

    @contextmanager
    def time(self, name: str, what: str) -> Iterator[None]:
        """Adds the time that it takes; torch.profiler sees it as zcomm::`what`."""
        started = perf_counter()
        try:
            with Range(f"zcomm::{what}"):
                yield
        finally:
            setattr(self, name, getattr(self, name) + perf_counter() - started)
