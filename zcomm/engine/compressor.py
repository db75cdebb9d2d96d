"""Compressor: the gradients of one model, step by step. DDP and FSDP2 each have their own kind."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import asdict, fields
from time import perf_counter

from zcomm.engine.counters import Counters, Stats
from zcomm.engine.engine import Engine
from zcomm.engine.job import Job
from zcomm.sharding.residual_store import ResidualStore
from zcomm.sharding.settings import Settings
from zcomm.torch_private.autograd import Range


class Compressor(ABC):
    """What the models of DDP and FSDP2 have in common: engines, residuals, steps, failures."""

    feedback: ResidualStore

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.step = 0
        self._exposed_s = 0.0

    @abstractmethod
    def engines(self) -> Collection[Engine]:
        """One for each process group; none in a world of one rank."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until everything is known about the steps so far; raises what was not."""

    @abstractmethod
    def close(self) -> None:
        """Ends the engines."""

    @abstractmethod
    def remove(self) -> None:
        """Gives the model torch's own communication back, where torch can do that."""

    @abstractmethod
    def describe(self) -> str: ...

    def wait(self, *jobs: Job) -> None:
        """Until jobs are complete; the time counts as exposed."""
        started = perf_counter()
        with Range("zcomm::exposed"):
            for job in jobs:
                job.wait()
        self._exposed_s += perf_counter() - started

    @property
    def failed(self) -> bool:
        return any(engine.failure is not None for engine in self.engines())

    def raise_failure(self) -> None:
        for engine in self.engines():
            if engine.failure is not None:
                raise engine.failure

    def buffer_nbytes(self) -> int:
        return sum(engine.buffer_nbytes() for engine in self.engines())

    def stats(self) -> Stats:
        counted = [asdict(engine.counters) for engine in self.engines()]
        total = {f.name: sum(one[f.name] for one in counted) for f in fields(Counters)}
        return Stats(steps=self.step, exposed_s=self._exposed_s, **total)
