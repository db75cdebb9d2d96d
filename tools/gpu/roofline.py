"""How long a kernel would take if only memory, or its shuffles, limited it.

A prediction, not a measurement: nothing here has run on a GPU. The model leaves out arithmetic,
atomics in shared memory (topk) and launches.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu.traffic import Traffic

ELEMENTS = 25_000_000


@dataclass(frozen=True)
class Gpu:
    name: str
    bandwidth: float  # bytes/s
    multiprocessors: int
    clock_hz: float


GPUS = (
    Gpu("A100", 2.0e12, 108, 1.41e9),  # SXM, 80 GB
    Gpu("H100", 3.35e12, 132, 1.83e9),  # SXM
    Gpu("B200", 8.0e12, 148, 1.85e9),
)


@dataclass(frozen=True)
class Prediction:
    """Seconds for ELEMENTS elements."""

    memory_s: float
    shuffle_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.shuffle_s)


def predicted(traffic: Traffic, gpu: Gpu) -> Prediction:
    calls = ELEMENTS / traffic.call.n
    # A multiprocessor issues one warp shuffle per cycle.
    shuffles_per_s = gpu.multiprocessors * gpu.clock_hz
    return Prediction(
        calls * traffic.nbytes / gpu.bandwidth, calls * traffic.shuffles / shuffles_per_s
    )
