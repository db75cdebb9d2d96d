"""Stats: what a hook did since it was registered."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Totals of this rank since the hook was registered; divide by `steps` for one step.

    `raw_bytes` is what an uncompressed all-reduce of the same gradients would have sent, and
    `wire_bytes` what was sent. encode_s, wait_s and decode_s are of the engine's thread, which
    works beside backward; `exposed_s` is how long backward() had to wait for it at its end. On a
    CUDA device these are the times of the host, which issues work and does not wait for it.
    """

    steps: int
    raw_bytes: int
    wire_bytes: int
    encode_s: float
    wait_s: float
    decode_s: float
    exposed_s: float

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent; nan before the first step."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else math.nan
