"""The compressor of a model that FSDP2 shards: the collectives of its modules, step by step.

reduce-scatter   each rank sends each owner the gradient of its shards, encoded once
all-gather       each owner sends all ranks its shards, exactly or encoded, and decodes its own too

A step is one backward() in which gradients are reduced. Where FSDP only makes views of the output
of a reduce-scatter, backward continues meanwhile; all are done when it ends. FSDP waits for an
all-gather when it needs the parameters.
"""

from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm.base import arguments
from zcomm.base.host import this_host
from zcomm.base.log import note
from zcomm.engine.compressor import Compressor
from zcomm.engine.engine import Engine
from zcomm.engine.job import ALL_GATHER, REDUCE_SCATTER, Encoding, Job, JobData
from zcomm.engine.streams import streams_of
from zcomm.engine.tuning.choice import Choice, Gradients, decide
from zcomm.engine.tuning.measure import Ranks
from zcomm.fsdp.modules import ShardedModule, ShardedParameter
from zcomm.fsdp.routes import ModuleRoutes
from zcomm.sharding.chunks import ChunkSize
from zcomm.sharding.hierarchy import Hosts
from zcomm.sharding.residual_store import ResidualStore
from zcomm.sharding.settings import Settings
from zcomm.torch_private.autograd import at_end_of_backward, graph_task_id
from zcomm.transport import channels
from zcomm.transport.handshake import Caller, Met, agree, announcement
from zcomm.transport.restarts import expect_fresh_store


class FsdpCompressor(Compressor):
    """The compressed collectives of one model's FSDP modules."""

    def __init__(
        self, modules: Sequence[ShardedModule], settings: Settings, param_settings: Settings | None
    ) -> None:
        super().__init__(settings)
        self.modules, self.param_settings = modules, param_settings
        self._given = settings
        self.device = modules[0].device
        self._engines: dict[tuple[int, ...], Engine] = {}
        self._hosts: dict[tuple[int, ...], Hosts | None] = {}
        self.feedback = ResidualStore(
            settings.residual_storage,
            self.device,
            record_stream=partial(_record_stream, self._engines),
        )
        self.routes = ModuleRoutes(
            modules, settings, param_settings, self.feedback, self._chunk_size, self.hosts
        )
        self._choice: Choice | None = None
        self._task = -1  # the backward() in progress
        self._reducing: deque[Job] = deque()  # reduce-scatters that nobody has waited for
        self._gathering: Job | None = None  # the last all-gather
        self._meet()
        self.routes.hold_all()

    # The other ranks.

    def _meet(self) -> None:
        """Compares settings with all ranks, and makes an engine for each process group."""
        mine = self._compared()
        measuring: list[tuple[ShardedModule, Ranks, list[Caller]]] = []
        for ranks, module in {self._ranks(module): module for module in self.modules}.items():
            channels.expect_sender(self.device, module.process_group, "zcomm.fsdp.compress")
            expect_fresh_store(module.process_group)
            groups = (module.process_group, module.replica_group)
            callers = [
                self.caller("zcomm.fsdp.compress", group) for group in groups if group is not None
            ]
            first = module.replica * module.world_size
            everyone = agree(mine, callers, first + module.rank, announcement())
            if module.world_size > 1:
                ours = everyone[first : first + module.world_size]
                hierarchy, group = self.settings.hierarchy, module.process_group
                met = Met.of(ours, hierarchy, group, module.rank, self.device)
                self._hosts[ranks] = met.grouped
                # A side stream for each group: on a shared one, hops of two groups would wait for
                # each other, on another rank in another order.
                streams = streams_of(self.device)
                self._engines[ranks] = self._make_engine(callers[0], met.name, streams, met.grouped)
                measuring.append((module, Ranks(module.rank, met.hosts, met.grouped), callers))
                if met.grouped is not None and dist.get_rank() == 0:
                    note(f"zcomm: fsdp.compress: ranks are summed inside each host, {met.grouped}")
        if self.settings.is_auto:  # one choice for all modules, by the largest group
            measuring = measuring or [(self.modules[0], Ranks(0, [this_host()], None), [])]
            self._choose(*max(measuring, key=lambda one: one[1].world_size))

    def _choose(self, module: ShardedModule, ranks: Ranks, callers: list[Caller]) -> None:
        """What takes the place of codec="auto"."""
        two_hops = self.settings.two_hops(ranks.grouped)
        numels = [sum(p.numel for p in m.parameters if p.trainable) for m in self.modules]
        self._choice, _ = decide(
            self._engines.get(self._ranks(module)),
            ranks,
            callers,
            self.settings.threads,
            two_hops,
            self.device,
            Gradients("reduce_scatter", numels),
        )
        self._use(self._choice)
        if dist.get_rank() == 0:
            note(f"zcomm: fsdp.compress: {self._choice}")

    def _use(self, choice: Choice) -> None:
        self._choice = choice
        self.settings = self._given.chosen(choice.codec, choice.chunk_mb)
        self.routes.use(self.settings)

    def choice(self) -> Choice | None:
        return self._choice

    def resume_choice(self, saved: str) -> bool:
        """Continues with the choice of a saved run on the same hosts; else keeps its own."""
        assert self._choice is not None
        choice = Choice.loads(saved) if saved else None
        if choice is None or choice.hosts != self._choice.hosts:
            return False
        self._use(choice)
        self.feedback.keep(p.name for _, p in self.routes.fed_back())
        self.routes.hold_all()
        return True

    def _compared(self) -> dict[str, str]:
        """What must be the same on all ranks, as text."""
        parameters = {
            p.name: (tuple(p.shape), p.dim, p.trainable, *self.routes.specs(p))
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
            "deterministic": str(
                self.settings.is_auto and torch.are_deterministic_algorithms_enabled()
            ),
        }

    def _ranks(self, module: ShardedModule) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(module.process_group))

    def engine(self, module: ShardedModule) -> Engine:
        return self._engines[self._ranks(module)]

    def hosts(self, module: ShardedModule) -> Hosts | None:
        """Where the ranks of its process group are, if chunks make two hops."""
        return self._hosts.get(self._ranks(module))

    def _chunk_size(self, module: ShardedModule) -> ChunkSize:
        return self.engine(module).chunk_size(self.settings.chunk_size(module.world_size))

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
        channels.expect_sendable(input, what)
        self._begin_step()
        route = self.routes.reduce(module, used, input.dtype, self.step)
        prescale = module.prescale(op)
        encoding = Encoding(prescale, self.settings.verify, route.feedback)
        signature = f"{what}: {route.text}, times {prescale}"
        data = JobData(input, output)
        job = Job(what, REDUCE_SCATTER, route.chunks, data, encoding, signature)
        self._submit(module, job)
        self._reducing.append(job)
        if not (self._task >= 0 and module.takes_views(output, op, used)):
            self.wait_for_gradients()

    def wait_for_gradients(self, but: int = 0) -> None:
        """Until at most `but` reduce-scatters are in flight; raises the error of one that failed.

        The oldest come first. FSDP may add to what they have written.
        """
        while len(self._reducing) > but:
            self.wait(self._reducing.popleft())

    def make_room(self, module: ShardedModule) -> None:
        """Called before an input is allocated: they must not all be alive at once."""
        self.wait_for_gradients(but=module.input_buffers)

    def gather(self, module: ShardedModule, output: Tensor, input: Tensor) -> Job:
        """Overwrites `output` with all ranks' shards of the parameters, `input` among them; done
        when the job is complete."""
        what = f"all-gather of {module} in step {self.step}"
        route = self.routes.gather(module, input.dtype)
        encoding, signature = Encoding(verify=self.settings.verify), f"{what}: {route.text}"
        job = Job(what, ALL_GATHER, route.chunks, JobData(input, output), encoding, signature)
        self._submit(module, job)
        self._gathering = job
        return job

    def can_gather(self, module: ShardedModule, input: Tensor, group: Any) -> bool:
        """Whether zcomm can send a gather. If not, torch does, exactly: where a parameter decides
        itself what is gathered, where dtypes are mixed, and in the smaller group that
        `reshard_after_forward=n` makes.
        """
        if group.size() != module.world_size:
            return False  # what it gathers was already gathered and decoded
        found = input.dtype in arguments.SENT_DTYPES
        found = found and not any(p.has_extension for p in module.parameters)
        if not found and any(map(self.routes.param_codec, module.parameters)):
            raise ValueError(
                f"param_codec: expected parameters of one dtype (and without fsdp_pre_all_gather) "
                f"in {module}, got others; wrap them in FSDP modules of their own, or give "
                "param_codec a pattern with 'none' for them"
            )
        return found

    def _submit(self, module: ShardedModule, job: Job) -> None:
        engine = self.engine(module)
        for t in job.data.tensors():
            engine.record_stream(t)
        engine.submit(job)

    def wait(self, *jobs: Job) -> None:
        """Until jobs are complete; raises the error of one that failed."""
        super().wait(*jobs)
        for job in jobs:
            if job.error is not None:
                raise job.error

    # Steps.

    def _begin_step(self) -> None:
        """Has autograd call back once in each backward(), however the one before ended."""
        task = graph_task_id()
        if task != self._task:
            self._task = task if at_end_of_backward(self._end_step) else -1

    def _end_step(self) -> None:
        self._task = -1
        self.wait_for_gradients()
        self.step += 1

    # What a Handle asks for.

    def engines(self) -> Collection[Engine]:
        return self._engines.values()

    def synchronize(self) -> None:
        self.wait_for_gradients()
        for engine in self._engines.values():
            engine.synchronize()
        self.raise_failure()

    def close(self) -> None:
        """Ends the engines, and gives the modules torch's own collectives back."""
        for job in (*self._reducing, self._gathering):
            if job is not None:  # FSDP may still read its result
                job.wait()
        for module in self.modules:
            module.reset_collectives()
        for engine in self._engines.values():
            engine.stop()

    def describe(self) -> str:
        first = self.modules[0]
        ranks = f"{first.replicas} × {first.world_size} ranks"
        return f"{self.settings.codec}, step {self.step}, {len(self.modules)} modules, {ranks}"


def _record_stream(engines: dict[tuple[int, ...], Engine], t: Tensor) -> None:
    """A residual belongs to one engine; which one does not matter."""
    for engine in engines.values():
        engine.record_stream(t)
