"""The compressor: the gradients of one DDP model, bucket by bucket, step by step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from zcomm import arguments
from zcomm.buckets import Buckets, Part, Sink
from zcomm.chunks import Item, make_chunks
from zcomm.engine import Engine
from zcomm.job import Job
from zcomm.observers import Observers
from zcomm.parameters import trainable
from zcomm.settings import PLAIN, Settings, expect_same
from zcomm.sharding import even_bounds
from zcomm.steps import Counters, Range
from zcomm.transport import Transport, exchange, group_timeout_s, member_of

_STATE_VERSION = 1


@dataclass(frozen=True)
class Stats:
    """Totals of this rank since the hook was registered; divide by `steps` for one step.

    `raw_bytes` is what an uncompressed all-reduce of the same gradients would have sent, and
    `wire_bytes` what was sent. encode_s, wait_s and decode_s are of the engine's thread, which
    works beside backward; `exposed_s` is how long backward() had to wait for it at its end.
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


class Compressor:
    """The compressed all-reduce of one DDP model's gradients; with a sink, reduce-scatter.

    `compared` is what else must be the same on all ranks.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        settings: Settings,
        scaler: Any,
        compared: Mapping[str, str] | None = None,
    ) -> None:
        self.settings = settings
        self._scaler = scaler
        self.ddp = weakref.ref(ddp)
        self.group = ddp.process_group
        self.rank, self.world_size = member_of(self.group, "zcomm")
        self.buckets = Buckets(
            trainable(ddp), settings, self.rank, self.world_size, scaler is not None
        )
        self.feedback = self.buckets.feedback
        self.observers = Observers()
        self.optimizer: weakref.ref[Any] | None = None  # with ZeRO
        self.step = 0
        self.engine = self._meet(ddp.process_group, compared or {})
        self.scale = 1.0
        self._finite = True
        self._exposed_s = 0.0
        self._jobs: list[Job] = []

    def _meet(self, group: Any, compared: Mapping[str, str]) -> Engine | None:
        """Compares settings with all ranks, and makes the engine."""
        shapes = {name: (item.numel, item.codec.spec) for name, item in self.buckets.items.items()}
        mine = {**self.settings.compared(), **compared}
        mine |= {"scaler": str(self._scaler is not None), "parameters": repr(shapes)}
        everyone, name = exchange(mine, group)
        expect_same(everyone, self.rank)
        if self.world_size == 1:
            return None
        timeout_s = self.settings.timeout_s or group_timeout_s(group)
        engine = Engine(Transport(group, name, timeout_s), self.settings.threads)
        weakref.finalize(self, engine.stop)
        return engine

    @property
    def sink(self) -> Sink | None:
        return self.buckets.sink

    def reduce(self, bucket: Any) -> Any:
        """Hands a bucket to the engine; the future holds it when all ranks' mean is in place."""
        buffer: Tensor = bucket.buffer()
        arguments.expect_tensor(buffer, "bucket")
        future: Any = torch.futures.Future()
        with Range("zcomm::hook"):
            if bucket.index() == 0:
                self._begin_step()
            self._submit(bucket, buffer, future)
        if bucket.is_last() and not _at_end_of_backward(self._before_ddp_is_done):
            # A rank that has joined (torch's Join) plays its part outside of backward().
            self._end_step()
            self.raise_failure()
            self.observers.raise_failure()
        return future

    def _begin_step(self) -> None:
        self._expect_whole_world()
        self._finite = True
        self._jobs.clear()
        if self._scaler is not None:
            self._follow_scale()

    def _submit(self, bucket: Any, buffer: Tensor, future: Any) -> None:
        # First of all: it drops the local gradients.
        accumulate = self.sink is not None and self.sink.take(self.buckets.sunk_names(bucket))
        parts = self.buckets.parts(bucket, buffer, self.step)
        self.observers.take_bucket(bucket.index(), parts, buffer)
        left = [part.name for part in parts]

        def finish(error: BaseException | None) -> None:
            # DDP waits for the future in any case; the error is raised when DDP is done.
            left.pop()
            if left or future.done():
                return
            if error is None and self._scaler is not None and not _all_finite(buffer):
                self._finite = False
            future.set_result(buffer)

        for part in parts:
            self._jobs.append(self._job(part, bucket.index(), buffer, accumulate, finish))
            if self.engine is not None:
                self.engine.submit(self._jobs[-1])
            else:
                _keep(self._jobs[-1])

    def _job(self, part: Part, index: int, buffer: Tensor, accumulate: bool, finish: Any) -> Job:
        sharded = part.places is not None
        target = buffer
        if sharded:
            assert self.sink is not None
            target = self.sink.target(buffer.dtype)
        what = f"bucket {index} of step {self.step}"
        return Job(
            what,
            part.chunks,
            buffer,
            target,
            reduce=True,
            gather=not sharded,
            prescale=1 / self.world_size,
            verify=self.settings.verify,
            feedback=part.feedback[self.feedback.side] if part.feedback else None,
            places=part.places,
            accumulate=accumulate and sharded,
            signature=f"{what}: {part.name}, loss scale {self.scale}",
            finish=finish,
        )

    def _before_ddp_is_done(self) -> None:
        """The end of backward(), before DDP takes the results."""
        started = perf_counter()
        with Range("zcomm::exposed"):
            self._wait()
        self._exposed_s += perf_counter() - started
        self._end_step()
        if self.failed or self.observers.failed or self.sink is not None:
            # DDP must come to its end first, or it would be broken; then the error is raised.
            _at_end_of_backward(self._after_ddp_is_done)

    def _after_ddp_is_done(self) -> None:
        if self.sink is not None:
            self.sink.end_backward()
        self.raise_failure()
        self.observers.raise_failure()

    def _wait(self) -> None:
        """Until the engine has completed all buckets, or failed."""
        for job in self._jobs:
            job.wait()

    def _end_step(self) -> None:
        self._wait()
        self._jobs.clear()
        if self._scaler is not None and self.sink is not None and not self.failed:
            # Owners see no sums but their own: ranks would differ about the step.
            self._finite = all(self.exchange([float(self.sink.all_finite() and self._finite)]))
        if self.failed:
            return
        if self._finite:
            self.feedback.flip()
        self.step += 1
        self.buckets.end_step()
        self.observers.end_step()

    def close(self) -> None:
        """Ends the engine: no bucket can be reduced any more."""
        if self.engine is not None:
            self.engine.stop()

    @property
    def failed(self) -> bool:
        return self.engine is not None and self.engine.failure is not None

    def raise_failure(self) -> None:
        if self.engine is not None and self.engine.failure is not None:
            raise self.engine.failure

    def exchange(self, mine: Sequence[float]) -> list[float]:
        """Every rank's numbers, in rank order; as many on each. An engine that fails says so later.

        All ranks get the same numbers, so they come to the same decision.
        """
        if self.engine is None:
            return list(mine)
        count = len(mine)
        bounds = even_bounds(count, self.world_size)
        items = [Item("", PLAIN, bounds[-1], 0, bounds)]
        size = self.settings.chunk_size(self.world_size)
        chunks = make_chunks(items, self.rank, self.world_size, size, raw=True)
        everyone = torch.zeros(bounds[-1], dtype=torch.float64)
        what = f"exchange of {count} numbers in step {self.step}"
        numbers = torch.tensor(mine, dtype=torch.float64)
        self.run(Job(what, chunks, numbers, everyone, reduce=False, gather=True, signature=what))
        return everyone.tolist()

    def run(self, job: Job) -> None:
        """Submits a job and waits for it."""
        assert self.engine is not None
        self.engine.submit(job)
        job.wait()

    def _follow_scale(self) -> None:
        """Residuals are those of scaled gradients: they change with the scale."""
        scale = float(self._scaler.get_scale())
        if scale != self.scale:
            if self.step:
                self.feedback.rescale(scale / self.scale)
            self.scale = scale

    def _expect_whole_world(self) -> None:
        ddp = self.ddp()
        if self.sink is not None and getattr(getattr(ddp, "_join_config", None), "enable", False):
            raise ValueError(
                f"rank {self.rank}: expected training without Join, got ZeroOptimizer inside of "
                "it: a rank that has run out of data would miss step(), which all ranks must "
                "call; give all ranks as many batches, or use zcomm.compress"
            )
        if ddp is not None and getattr(ddp, "_divide_by_initial_world_size", True) is False:
            raise ValueError(
                f"rank {self.rank}: expected Join with divide_by_initial_world_size=True, got "
                "False: zcomm's means and residuals are those of all ranks"
            )

    def stats(self) -> Stats:
        counters = asdict(self.engine.counters if self.engine else Counters())
        return Stats(steps=self.step, exposed_s=self._exposed_s, **counters)

    def state_dict(self) -> dict[str, Any]:
        self.buckets.hold_all()
        return {
            "version": _STATE_VERSION,
            "step": self.step,
            "scale": self.scale,
            "rank": self.rank,
            "world_size": self.world_size,
            "codecs": {name: item.codec.spec for name, item in self.buckets.items.items()},
            "residuals": self.feedback.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mine = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(mine):
            got = str(sorted(state)) if isinstance(state, Mapping) else arguments.describe(state)
            raise ValueError(
                f"rank {self.rank}: load_state_dict: expected what handle.state_dict() returned, a "
                f"dict with {sorted(mine)}, got {got}"
            )
        for field in ("version", "world_size", "rank", "codecs"):
            if state[field] != mine[field]:
                expected, got = arguments.first_difference(mine[field], state[field])
                raise ValueError(
                    f"rank {self.rank}: load_state_dict: expected {field} {expected}, got {got}; "
                    "load each rank's own state into the same model, codecs and number of ranks"
                )
        self.feedback.load_state_dict(state["residuals"])
        self.step, self.scale = int(state["step"]), float(state["scale"])

    def describe(self) -> str:
        return f"{self.settings.codec}, step {self.step}, {self.world_size} ranks"


def _at_end_of_backward(callback: Any) -> bool:
    """Has autograd call it when backward() is done; False if no backward() is under way."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True


def _keep(job: Job) -> None:
    """The job of a world of one rank: with a sink, what the bucket holds is the sum."""
    source, target = job.source, job.target
    assert source is not None
    assert target is not None
    for chunk, layout in zip(job.chunks, job.places or ()):
        for of, to in zip(chunk.wire.segments, layout.segments):
            values = source[of.offset : of.offset + of.numel]
            part = target[to.offset : to.offset + to.numel]
            part.add_(values) if job.accumulate else part.copy_(values)
    job.complete()


def _all_finite(t: Tensor) -> bool:
    """One pass, no memory: the largest magnitude is NaN or Inf if any element is."""
    return not t.numel() or math.isfinite(torch.linalg.vector_norm(t, math.inf).item())
