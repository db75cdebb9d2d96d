"""The compressor of a model that FSDP2 shards: the collectives of its modules, step by step.

reduce-scatter   each rank sends each owner the gradient of its shards, encoded once
all-gather       each owner sends all ranks its shards, exactly or encoded; it decodes its own, too

A step is one backward() in which gradients are reduced.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm import arguments
from zcomm.chunks import Chunk, Item, make_chunks
from zcomm.codecs import Codec, codec
from zcomm.end_of_backward import at_end_of_backward
from zcomm.engines import make_engine
from zcomm.feedback import ChunkFeedback, Feedback, Mode
from zcomm.fsdp_modules import ShardedModule, ShardedParameter
from zcomm.job import Job
from zcomm.job_thread import JobThread
from zcomm.settings import PLAIN, Settings, expect_same
from zcomm.stats import Stats
from zcomm.steps import Counters
from zcomm.streams import Streams, streams_of
from zcomm.transport import (
    exchange,
    expect_sendable,
    expect_sender,
    gather_bytes,
    group_timeout_s,
)

# Codecs that carry a parameter's own dtype exactly.
_EXACT = {
    torch.float32: "none",
    torch.float64: "none",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


class Plan(NamedTuple):
    """How some parameters of a module travel, and their residuals."""

    chunks: Sequence[Chunk]
    feedback: list[ChunkFeedback] | None
    text: str


class FsdpCompressor:
    """The compressed collectives of one model's FSDP modules."""

    def __init__(
        self,
        modules: Sequence[ShardedModule],
        settings: Settings,
        param_settings: Settings | None,
    ) -> None:
        self.modules, self.settings, self.param_settings = modules, settings, param_settings
        self.step = 0
        self.device = modules[0].device
        self.streams: Streams | None = streams_of(self.device)
        self.feedback = Feedback(dtype=settings.residual_storage)
        self.feedback.device = self.device
        if self.streams is not None:
            self.feedback.keep = self.streams.keep
        self._task = -1  # the backward() that is under way
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._engines: dict[tuple[int, ...], JobThread] = {}
        self._meet()
        self._hold_all()

    # The other ranks.

    def _meet(self) -> None:
        """Compares settings with all ranks, and makes an engine for each process group."""
        mine = self._compared()
        for ranks, module in {self._ranks(module): module for module in self.modules}.items():
            expect_sender(self.device, module.process_group, "zcomm.fsdp.compress")
            everyone, name = exchange(mine, module.process_group)
            if module.replica_group is not None:
                theirs = gather_bytes(json.dumps(list(everyone)).encode(), module.replica_group)
                everyone = [one for part in theirs for one in json.loads(part)]
            expect_same(everyone, module.replica * module.world_size + module.rank)
            if module.world_size > 1:
                self._engines[ranks] = self._make_engine(module, name)

    def _compared(self) -> dict[str, str]:
        """What must be the same on all ranks, as text."""
        parameters = {
            p.name: (tuple(p.shape), p.dim, self._codec(p).spec, p.trainable)
            for module in self.modules
            for p in module.parameters
        }
        param = self.param_settings.compared() if self.param_settings else {}
        return {
            **self.settings.compared(),
            "param_codec": param.get("codec", "None"),
            "FSDP modules": repr([str(module) for module in self.modules]),
            "mesh": repr([(m.replicas, m.world_size) for m in self.modules]),
            "parameters": repr(parameters),
            "device": self.device.type,
        }

    def _make_engine(self, module: ShardedModule, name: str) -> JobThread:
        group, settings = module.process_group, self.settings
        timeout_s = settings.timeout_s or group_timeout_s(group, self.device)
        engine = make_engine(group, name, timeout_s, self.streams, settings.threads)
        weakref.finalize(self, engine.stop)
        return engine

    def _ranks(self, module: ShardedModule) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(module.process_group))

    def engine(self, module: ShardedModule) -> JobThread:
        return self._engines[self._ranks(module)]

    # The collectives.

    def reduce(
        self,
        module: ShardedModule,
        output: Tensor,
        input: Tensor,
        op: Any,
        used: Sequence[ShardedParameter],
    ) -> None:
        """Overwrites `output` with this rank's shards of the reduced gradients."""
        what = f"reduce-scatter of {module} in step {self.step}"
        expect_sendable(input, what)
        self._begin_step()
        plan = self._reduce_plan(module, used, input.dtype)
        prescale = module.prescale(op)
        job = Job(
            what,
            plan.chunks,
            input,
            output,
            reduce=True,
            gather=False,
            prescale=prescale,
            verify=self.settings.verify,
            feedback=plan.feedback,
            signature=f"{what}: {plan.text}, times {prescale}",
        )
        self._run(module, job)

    def gather(self, module: ShardedModule, output: Tensor, input: Tensor) -> None:
        """Overwrites `output` with all ranks' shards of the parameters, `input` among them."""
        what = f"all-gather of {module} in step {self.step}"
        plan = self._gather_plan(module, input.dtype)
        job = Job(
            what,
            plan.chunks,
            input,
            output,
            reduce=False,
            gather=True,
            verify=self.settings.verify,
            signature=f"{what}: {plan.text}",
        )
        self._run(module, job)

    def can_gather(self, module: ShardedModule, input: Tensor, group: Any) -> bool:
        """Whether a gather is one of parameters as they are; if not, it is torch's, and exact.

        It is not where a parameter decides itself what is gathered, where dtypes are mixed, and in
        the smaller group that `reshard_after_forward=n` makes.
        """
        if group.size() != module.world_size:
            return False  # of what was gathered, and decoded, before
        found = input.dtype in arguments.SENT_DTYPES
        found = found and not any(p.has_extension for p in module.parameters)
        if not found and any(self._param_codec(p, torch.float32) for p in module.parameters):
            raise ValueError(
                f"param_codec: expected parameters of one dtype (and without fsdp_pre_all_gather) "
                f"in {module}, got others; wrap them in FSDP modules of their own, or give "
                "param_codec a pattern with 'none' for them"
            )
        return found

    def _run(self, module: ShardedModule, job: Job) -> None:
        engine = self.engine(module)
        for t in (job.source, job.target):
            if t is not None:
                engine.keep(t)
        engine.submit(job)
        job.wait()
        if job.error is not None:
            raise job.error

    # Steps.

    def _begin_step(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task and at_end_of_backward(self._end_step):
            self._task = task

    def _end_step(self) -> None:
        self._task = -1
        self.step += 1

    # Plans.

    def _reduce_plan(
        self, module: ShardedModule, used: Sequence[ShardedParameter], dtype: torch.dtype
    ) -> Plan:
        plain = self.step < self.settings.start_step or dtype is torch.float64
        key = (module.name, "reduce", dtype, plain, *(p.name for p in used))
        if key not in self._plans:
            codecs = [PLAIN if plain else self._codec(p) for p in used]
            self._plans[key] = self._plan(module, used, codecs, dtype, fed_back=not plain)
        return self._plans[key]

    def _gather_plan(self, module: ShardedModule, dtype: torch.dtype) -> Plan:
        key = module.name, "gather", dtype
        if key not in self._plans:
            exact = codec(_EXACT[dtype])
            codecs = [self._param_codec(p, dtype) or exact for p in module.parameters]
            self._plans[key] = self._plan(module, module.parameters, codecs, dtype, fed_back=False)
        return self._plans[key]

    def _plan(
        self,
        module: ShardedModule,
        parameters: Sequence[ShardedParameter],
        codecs: Sequence[Codec],
        dtype: torch.dtype,
        fed_back: bool,
    ) -> Plan:
        items = module.items(parameters, codecs)
        size = self.settings.chunk_size(module.world_size)
        raw = dtype is torch.float64
        chunks = make_chunks(items, module.rank, module.world_size, size, raw)
        bound = None
        if fed_back and any(self.settings.mode(used) for used in codecs):
            bound = self.feedback.bind(chunks, module.rank, self._mode, gather=False)[0]
        named = ", ".join(f"{p.name} as {used.spec}" for p, used in zip(parameters, codecs))
        return Plan(chunks, bound, f"{dtype} {named}")

    def _mode(self, item: Item) -> Mode:
        """How residuals of an item are fed back; padding has none."""
        return self.settings.mode(item.codec) if item.key else False

    def _codec(self, p: ShardedParameter) -> Codec:
        return self.settings.codec_of(p.name, p.numel)

    def _param_codec(self, p: ShardedParameter, dtype: torch.dtype) -> Codec | None:
        """What a parameter is gathered with; None: exactly."""
        if self.param_settings is None or dtype is torch.float64:
            return None
        found = self.param_settings.codec_of(p.name, p.numel)
        return None if found.name == "none" else found

    def _hold_all(self) -> None:
        """Residuals of all trainable parameters: what they take is known before training."""
        for module, p in self.fed_back():
            items = module.items([p], [self._codec(p)])
            self.feedback.hold(filter(self._mode, items), module.rank, gather=False)

    def fed_back(self) -> list[tuple[ShardedModule, ShardedParameter]]:
        """The parameters that have residuals."""
        return [
            (module, p)
            for module in self.modules
            for p in module.parameters
            if p.trainable and self.settings.mode(self._codec(p)) is not False
        ]

    # What others ask.

    def codecs(self) -> Mapping[str, str]:
        return {p.name: self._codec(p).spec for m in self.modules for p in m.parameters}

    def buffer_nbytes(self) -> int:
        return sum(engine.buffer_nbytes() for engine in self._engines.values())

    def stats(self) -> Stats:
        counted = [asdict(engine.counters) for engine in self._engines.values()]
        total = {f.name: sum(one[f.name] for one in counted) for f in fields(Counters)}
        return Stats(steps=self.step, exposed_s=0.0, **total)

    def settle(self) -> None:
        """What a device found out about earlier steps is known; raises what was not."""
        for engine in self._engines.values():
            engine.settle()
            if engine.failure is not None:
                raise engine.failure

    def close(self) -> None:
        """Ends the engines, and gives the modules torch's own collectives back."""
        for module in self.modules:
            module.reset_collectives()
        for engine in self._engines.values():
            engine.stop()

    def describe(self) -> str:
        first = self.modules[0]
        ranks = f"{first.replicas} × {first.world_size} ranks"
        return f"{self.settings.codec}, step {self.step}, {len(self.modules)} modules, {ranks}"
