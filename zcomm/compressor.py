"""The compressor: the gradients of one DDP model, bucket by bucket, step by step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from zcomm import arguments
from zcomm.engine import Engine
from zcomm.feedback import ChunkFeedback, Feedback, Mode
from zcomm.job import Job
from zcomm.plan import Chunk, Item, block_of, make_chunks
from zcomm.settings import PLAIN, Settings, expect_same
from zcomm.sharding import owner_bounds
from zcomm.steps import Counters
from zcomm.transport import Transport, exchange, expect_sendable, group_timeout_s, member_of

_STATE_VERSION = 1
_IGNORE = (
    "; or exclude it with "
    "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [name])"
)


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


@dataclass
class _Plan:
    """A bucket of certain parameters in a certain order, and its residuals for each side."""

    chunks: tuple[Chunk, ...]
    feedback: list[list[ChunkFeedback]] | None
    name: str


class Compressor:
    """The compressed all-reduce of one DDP model's gradients."""

    def __init__(self, ddp: DistributedDataParallel, settings: Settings, scaler: Any) -> None:
        self.settings = settings
        self._scaler = scaler
        self._ddp = weakref.ref(ddp)
        self.rank, self.world_size = member_of(ddp.process_group, "zcomm")
        named = _trainable(ddp)
        self._items = _items(named, settings, self.world_size)
        self._names = {id(p): name for name, p in named.items()}
        self.feedback = Feedback(dtype=settings.residual_dtype)
        self.feedback.double_buffered = scaler is not None
        self.step = 0
        self.engine = self._meet(ddp.process_group)
        self._scale = 1.0
        self._finite = True
        self._exposed_s = 0.0
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._used: set[tuple[int, ...]] = set()
        self._jobs: list[Job] = []

    def _meet(self, group: Any) -> Engine | None:
        """Compares settings with all ranks, and makes the engine."""
        shapes = {name: (item.numel, item.codec.spec) for name, item in self._items.items()}
        mine = self.settings.compared()
        mine |= {"scaler": str(self._scaler is not None), "parameters": repr(shapes)}
        everyone, name = exchange(mine, group)
        expect_same(everyone, self.rank)
        if self.world_size == 1:
            return None
        timeout_s = self.settings.timeout_s or group_timeout_s(group)
        engine = Engine(Transport(group, name, timeout_s), self.settings.threads)
        weakref.finalize(self, engine.stop)
        return engine

    def reduce(self, bucket: Any) -> Any:
        """Hands a bucket to the engine; the future holds it when all ranks' mean is in place."""
        buffer: Tensor = bucket.buffer()
        arguments.expect_tensor(buffer, "bucket")
        future: Any = torch.futures.Future()
        if bucket.index() == 0:
            self._begin_step()
        if self.engine is None:
            future.set_result(buffer)
        else:
            self._submit(bucket, buffer, future)
        if bucket.is_last() and not _at_end_of_backward(self._before_ddp_is_done):
            # A rank that has joined (torch's Join) plays its part outside of backward().
            self._end_step()
            self._raise_failure()
        return future

    def _begin_step(self) -> None:
        self._expect_whole_world()
        self._finite = True
        self._jobs.clear()
        self._used.clear()
        if self._scaler is not None:
            self._follow_scale()

    def _submit(self, bucket: Any, buffer: Tensor, future: Any) -> None:
        assert self.engine is not None
        plan = self._plan(bucket, buffer)
        feedback = plan.feedback[self.feedback.side] if plan.feedback else None

        def finish(error: BaseException | None) -> None:
            # DDP waits for the future in any case; the error is raised when DDP is done.
            if error is None and self._scaler is not None and not _all_finite(buffer):
                self._finite = False
            if not future.done():
                future.set_result(buffer)

        job = Job(
            f"bucket {bucket.index()} of step {self.step}",
            plan.chunks,
            buffer,
            buffer,
            reduce=True,
            gather=True,
            prescale=1 / self.world_size,
            verify=self.settings.verify,
            feedback=feedback,
            signature=f"bucket {bucket.index()} of step {self.step}: {plan.name}, loss scale "
            f"{self._scale}",
            finish=finish,
        )
        self._jobs.append(job)
        self.engine.submit(job)

    def _before_ddp_is_done(self) -> None:
        """The end of backward(), before DDP takes the results."""
        started = perf_counter()
        self._wait()
        self._exposed_s += perf_counter() - started
        self._end_step()
        if self.engine is not None and self.engine.failure is not None:
            # DDP must come to its end first, or it would be broken; then the error is raised.
            _at_end_of_backward(self._raise_failure)

    def _wait(self) -> None:
        """Until the engine has completed all buckets, or failed."""
        for job in self._jobs:
            job.wait()

    def _end_step(self) -> None:
        self._wait()
        self._jobs.clear()
        if self.engine is not None and self.engine.failure is not None:
            return
        if self._finite:
            self.feedback.flip()
        self.step += 1
        # Buckets that were not used in this step belong to the time before DDP's rebuild.
        self._plans = {key: plan for key, plan in self._plans.items() if key in self._used}

    def _raise_failure(self) -> None:
        if self.engine is not None and self.engine.failure is not None:
            raise self.engine.failure

    def _plan(self, bucket: Any, buffer: Tensor) -> _Plan:
        parameters = bucket.parameters()
        warming_up = self.step < self.settings.start_step
        key = (warming_up, *map(id, parameters))
        self._used.add(key)
        if key not in self._plans:
            self._plans[key] = self._make_plan(bucket, buffer, warming_up)
        return self._plans[key]

    def _make_plan(self, bucket: Any, buffer: Tensor, warming_up: bool) -> _Plan:
        raw = buffer.dtype is torch.float64
        items = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
            # Where it lies in memory, whatever order DDP has put it in.
            offset = (gradient.data_ptr() - buffer.data_ptr()) // buffer.element_size()
            item = self._items[self._name(parameter)]._replace(offset=offset)
            items.append(item._replace(codec=PLAIN) if warming_up or raw else item)
        size = self.settings.chunk_size(self.world_size)
        chunks = make_chunks(items, self.rank, self.world_size, size, raw)
        bound = None
        if not raw and any(self._mode(item) for item in items):
            bound = self.feedback.bind(chunks, self.rank, self._mode)
        specs = ", ".join(sorted({item.codec.spec for item in items}))
        name = f"{len(items)} parameters, {buffer.numel()} {buffer.dtype} elements as {specs}"
        return _Plan(chunks, bound, name)

    def _name(self, parameter: Tensor) -> str:
        name = self._names.get(id(parameter))
        if name is None:
            raise ValueError(
                f"bucket: expected parameters that had requires_grad when the hook met the model, "
                f"got another one, {arguments.describe(parameter)}; freeze parameters before "
                "wrapping the model, and use one HookState for one model"
            )
        return name

    def _mode(self, item: Item) -> Mode:
        return self.settings.mode(item.codec)

    def _follow_scale(self) -> None:
        """Residuals are those of scaled gradients: they change with the scale."""
        scale = float(self._scaler.get_scale())
        if scale != self._scale:
            if self.step:
                self.feedback.rescale(scale / self._scale)
            self._scale = scale

    def _expect_whole_world(self) -> None:
        ddp = self._ddp()
        if ddp is not None and getattr(ddp, "_divide_by_initial_world_size", True) is False:
            raise ValueError(
                f"rank {self.rank}: expected Join with divide_by_initial_world_size=True, got "
                "False: zcomm's means and residuals are those of all ranks"
            )

    def stats(self) -> Stats:
        counters = asdict(self.engine.counters if self.engine else Counters())
        return Stats(steps=self.step, exposed_s=self._exposed_s, **counters)

    def state_dict(self) -> dict[str, Any]:
        self._hold_all()
        return {
            "version": _STATE_VERSION,
            "step": self.step,
            "scale": self._scale,
            "rank": self.rank,
            "world_size": self.world_size,
            "codecs": {name: item.codec.spec for name, item in self._items.items()},
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
                expected, got = _difference(mine[field], state[field])
                raise ValueError(
                    f"rank {self.rank}: load_state_dict: expected {field} {expected}, got {got}; "
                    "load each rank's own state into the same model, codecs and number of ranks"
                )
        self.feedback.load_state_dict(state["residuals"])
        self.step, self._scale = int(state["step"]), float(state["scale"])

    def _hold_all(self) -> None:
        """Residuals of every parameter, also of those that no bucket has brought yet."""
        compressed = [item for item in self._items.values() if self._mode(item)]
        self.feedback.hold(compressed, self.rank)

    def describe(self) -> str:
        return f"{self.settings.codec}, step {self.step}, {self.world_size} ranks"


def _at_end_of_backward(callback: Any) -> bool:
    """Has autograd call it when backward() is done; False if no backward() is under way."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True


def _trainable(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters that DDP reduces, by name; refuses those that zcomm cannot send."""
    ignored = getattr(ddp, "parameters_to_ignore", ())
    # torch.compile's wrapper adds to the names; patterns and saved states should not see it.
    named = {
        name.replace("_orig_mod.", ""): p
        for name, p in ddp.module.named_parameters()
        if p.requires_grad and name not in ignored
    }
    for name, p in named.items():
        expect_sendable(p, f"parameter {name!r}", _IGNORE)
    for prefix, module in ddp.module.named_modules():
        name = f"{prefix}.weight".lstrip(".").replace("_orig_mod.", "")
        if getattr(module, "sparse", False) is True and name in named:
            raise ValueError(
                f"parameter {name!r}: expected dense gradients, got a "
                f"{type(module).__name__}(sparse=True); use sparse=False{_IGNORE}"
            )
    return named


def _items(named: Mapping[str, Tensor], settings: Settings, world_size: int) -> dict[str, Item]:
    """An item for each parameter; its owners do not depend on buckets."""
    codecs = {name: settings.codec_of(name, p.numel()) for name, p in named.items()}
    sizes = [(p.numel(), block_of(codecs[name])) for name, p in named.items()]
    bounds = owner_bounds(sizes, world_size)
    return {
        name: Item(name, codecs[name], p.numel(), 0, cuts)
        for (name, p), cuts in zip(named.items(), bounds)
    }


def _all_finite(t: Tensor) -> bool:
    """One pass, no memory: the largest magnitude is NaN or Inf if any element is."""
    return not t.numel() or math.isfinite(torch.linalg.vector_norm(t, math.inf).item())


def _difference(expected: Any, got: Any) -> tuple[str, str]:
    """Of two dicts only the first entry that differs."""
    if not isinstance(expected, dict) or not isinstance(got, Mapping):
        return repr(expected), repr(got)
    name = next(k for k in sorted({*expected, *got}) if expected.get(k) != got.get(k))
    return f"{name!r}: {expected.get(name)!r}", f"{got.get(name)!r}"
