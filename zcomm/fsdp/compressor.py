"""The compressor of a model that FSDP2 shards: the collectives of its modules, step by step.

reduce-scatter   each rank sends each owner the gradient of its shards, encoded once
all-gather       each owner sends all ranks its shards, exactly or encoded; it decodes its own, too

A step is one backward() in which gradients are reduced. Where FSDP only makes views of the output
of a reduce-scatter, backward goes on meanwhile; all are done when it ends. FSDP waits for an
all-gather when it needs the parameters.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zcomm.base import arguments
from zcomm.engine.choice import make_engine
from zcomm.engine.counters import Counters
from zcomm.engine.job import Job
from zcomm.engine.job_thread import JobThread
from zcomm.engine.stats import Stats
from zcomm.engine.streams import streams_of
from zcomm.fsdp.modules import ShardedModule, ShardedParameter
from zcomm.fsdp.plans import FsdpPlans
from zcomm.sharding.settings import Settings, expect_same
from zcomm.torch_private.autograd import at_end_of_backward, graph_task_id
from zcomm.torch_private.profiler import Range
from zcomm.transport.channels import (
    exchange,
    expect_sendable,
    expect_sender,
    gather_bytes,
    group_timeout_s,
)


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
        self.plans = FsdpPlans(modules, settings, param_settings)
        self.feedback = self.plans.feedback
        self._task = -1  # the backward() that is under way
        self._reducing: deque[Job] = deque()  # reduce-scatters that nobody has waited for
        self._exposed_s = 0.0
        self._gathering: Job | None = None  # the last all-gather
        self._engines: dict[tuple[int, ...], JobThread] = {}
        self.feedback.keep = partial(_keep, self._engines)
        self._meet()
        self.plans.hold_all()

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
            p.name: (tuple(p.shape), p.dim, p.trainable, *self.plans.specs(p))
            for module in self.modules
            for p in module.parameters
        }
        param = self.param_settings
        return {
            **self.settings.compared(),
            "param_codec": "None" if param is None else param.compared()["codec"],
            "FSDP modules": repr([str(module) for module in self.modules]),
            "mesh": repr([(m.replicas, m.world_size) for m in self.modules]),
            "parameters": repr(parameters),
            "device": self.device.type,
        }

    def _make_engine(self, module: ShardedModule, name: str) -> JobThread:
        group, settings = module.process_group, self.settings
        timeout_s = settings.timeout_s or group_timeout_s(group, self.device)
        # A side stream each: on one, hops of two groups would wait for each other, on some ranks in
        # this order and on some in that.
        streams = streams_of(self.device)
        engine = make_engine(group, name, timeout_s, streams, settings.threads)
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
        plan = self.plans.reduce(module, used, input.dtype, self.step)
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
        self._submit(module, job)
        self._reducing.append(job)
        if not (self._task >= 0 and module.takes_views(output, op, used)):
            self.wait_for_gradients()

    def wait_for_gradients(self, but: int = 0) -> None:
        """Until at most so many reduce-scatters are under way; raises the error of one that failed.

        The oldest come first. FSDP may add to what they have written.
        """
        while len(self._reducing) > but:
            self.wait(self._reducing.popleft())

    def make_room(self, module: ShardedModule) -> None:
        """Before the input of a reduce-scatter is made: not all of a model's are alive at once."""
        self.wait_for_gradients(but=module.input_buffers)

    def gather(self, module: ShardedModule, output: Tensor, input: Tensor) -> Job:
        """Overwrites `output` with all ranks' shards of the parameters, `input` among them.

        It has when the job has completed.
        """
        what = f"all-gather of {module} in step {self.step}"
        plan = self.plans.gather(module, input.dtype)
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
        self._submit(module, job)
        self._gathering = job
        return job

    def can_gather(self, module: ShardedModule, input: Tensor, group: Any) -> bool:
        """Whether a gather is one of parameters as they are; if not, it is torch's, and exact.

        It is not where a parameter decides itself what is gathered, where dtypes are mixed, and in
        the smaller group that `reshard_after_forward=n` makes.
        """
        if group.size() != module.world_size:
            return False  # of what was gathered, and decoded, before
        found = input.dtype in arguments.SENT_DTYPES
        found = found and not any(p.has_extension for p in module.parameters)
        if not found and any(map(self.plans.param_codec, module.parameters)):
            raise ValueError(
                f"param_codec: expected parameters of one dtype (and without fsdp_pre_all_gather) "
                f"in {module}, got others; wrap them in FSDP modules of their own, or give "
                "param_codec a pattern with 'none' for them"
            )
        return found

    def _submit(self, module: ShardedModule, job: Job) -> None:
        engine = self.engine(module)
        for t in (job.source, job.target):
            if t is not None:
                engine.keep(t)
        engine.submit(job)

    def wait(self, job: Job) -> None:
        """Until a job has completed; raises its error."""
        started = perf_counter()
        with Range("zcomm::exposed"):
            job.wait()
        self._exposed_s += perf_counter() - started
        if job.error is not None:
            raise job.error

    # Steps.

    def _begin_step(self) -> None:
        """Has autograd call back, once in each backward(), whatever became of the one before."""
        task = graph_task_id()
        if task != self._task:
            self._task = task if at_end_of_backward(self._end_step) else -1

    def _end_step(self) -> None:
        self._task = -1
        self.wait_for_gradients()
        self.step += 1

    # What others ask.

    def buffer_nbytes(self) -> int:
        return sum(engine.buffer_nbytes() for engine in self._engines.values())

    def stats(self) -> Stats:
        counted = [asdict(engine.counters) for engine in self._engines.values()]
        total = {f.name: sum(one[f.name] for one in counted) for f in fields(Counters)}
        return Stats(steps=self.step, exposed_s=self._exposed_s, **total)

    def settle(self) -> None:
        """All is done, and what a device found out about it known; raises what was not."""
        self.wait_for_gradients()
        for engine in self._engines.values():
            engine.settle()
            if engine.failure is not None:
                raise engine.failure

    def close(self) -> None:
        """Ends the engines, and gives the modules torch's own collectives back."""
        for job in (*self._reducing, self._gathering):
            if job is not None:  # FSDP may still read what it has been promised
                job.wait()
        for module in self.modules:
            module.reset_collectives()
        for engine in self._engines.values():
            engine.stop()

    def describe(self) -> str:
        first = self.modules[0]
        ranks = f"{first.replicas} × {first.world_size} ranks"
        return f"{self.settings.codec}, step {self.step}, {len(self.modules)} modules, {ranks}"


def _keep(engines: dict[tuple[int, ...], JobThread], t: Tensor) -> None:
    """A residual is one engine's; which one's is of no importance."""
    for engine in engines.values():
        engine.keep(t)
