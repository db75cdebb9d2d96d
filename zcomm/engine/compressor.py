"""Compressor: the gradients of one model, step by step. DDP and FSDP2 each have their own kind."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import asdict, fields
from time import perf_counter
from typing import Any

import torch

from zcomm.engine.counters import Counters, Stats
from zcomm.engine.engine import Engine, make_engine
from zcomm.engine.job import Job
from zcomm.engine.streams import Streams
from zcomm.engine.tuning.choice import Choice
from zcomm.sharding.hierarchy import Hosts
from zcomm.sharding.residual_store import ResidualStore
from zcomm.sharding.settings import Settings
from zcomm.torch_private.autograd import Range
from zcomm.transport.channels import group_timeout_s
from zcomm.transport.handshake import Caller


class Compressor(ABC):
    """What the models of DDP and FSDP2 have in common: engines, residuals, steps, failures."""

    device: torch.device
    feedback: ResidualStore

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.step = 0
        self._exposed_s = 0.0

    def _make_engine(
        self, caller: Caller, name: str, streams: Streams | None, hosts: Hosts | None = None
    ) -> Engine:
        """An engine for a process group, which stops when the compressor goes away."""
        engine = make_engine(caller, name, streams, self.settings.threads, hosts)
        weakref.finalize(self, engine.stop)
        return engine

    def timeout_s(self, group: Any) -> float:
        return self.settings.timeout_s or group_timeout_s(group, self.device)

    def caller(self, what: str, group: Any) -> Caller:
        """For a call of all ranks of a group."""
        return Caller(what, group, self.timeout_s(group))

    @abstractmethod
    def engines(self) -> Collection[Engine]:
        """One for each process group; none in a world of one rank."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until everything is known about the steps so far; raises what was not."""

    @abstractmethod
    def close(self) -> None:
        """Ends the engines."""

    def remove(self) -> None:
        """Gives the model torch's own communication back, where torch can do that."""
        self.close()

    @abstractmethod
    def describe(self) -> str: ...

    @abstractmethod
    def choice(self) -> Choice | None:
        """What codec="auto" has chosen; None if a codec was given."""

    def transport(self) -> str:
        """What chunks go over. The process groups of an FSDP2 model may differ."""
        routes = dict.fromkeys(engine.transport.route for engine in self.engines())
        return "; ".join(routes) or "none: one rank sends nothing"

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
