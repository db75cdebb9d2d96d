"""The compressor of a DDP model: its gradients, bucket by bucket, step by step."""

import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zcomm.base import arguments
from zcomm.base.host import this_host
from zcomm.base.log import note
from zcomm.ddp.alone import BackwardWatch, LoneCaller
from zcomm.ddp.auto import NO_GRADIENTS, AutoCodec, deterministic, expected_gradients
from zcomm.ddp.buckets import Buckets, Part, Sink
from zcomm.ddp.loss_scale import DeviceFinite, Finite, LossScale
from zcomm.ddp.observers import Observers
from zcomm.ddp.parameters import device_of, frozen, trainable
from zcomm.ddp.unreduced import Unreduced
from zcomm.engine.compressor import Compressor
from zcomm.engine.engine import Engine
from zcomm.engine.job import ALL_GATHER, REDUCE_SCATTER, Encoding, Job, JobData, SinkData
from zcomm.engine.streams import streams_of
from zcomm.engine.tuning.choice import Choice
from zcomm.engine.tuning.measure import Ranks
from zcomm.sharding.chunks import Item, make_chunks
from zcomm.sharding.hierarchy import Hosts
from zcomm.sharding.owners import even_bounds
from zcomm.sharding.residual_store import ResidualStore
from zcomm.sharding.settings import PLAIN, Settings
from zcomm.torch_private.autograd import Range, at_end_of_backward
from zcomm.torch_private.ddp import divides_by_all_ranks, is_joining
from zcomm.transport.channels import expect_sender, member_of
from zcomm.transport.handshake import Caller, Met, meet


class DdpCompressor(Compressor):
    """The compressed all-reduce of one DDP model's gradients; with a sink, reduce-scatter.

    `compared` is what else must be the same on all ranks; `what` is how messages name the call, and
    `kind` is the collective that buckets take. In
    a world of one process the model may be unwrapped: then there are no buckets, and each
    backward() is a step.
    """

    def __init__(
        self,
        ddp: nn.Module,
        settings: Settings,
        scaler: Any,
        compared: Mapping[str, str] | None = None,
        what: str = "compress",
        kind: str = "all_reduce",
    ) -> None:
        super().__init__(settings)
        self._what, self.kind = what, kind
        self._scaler = scaler
        self.ddp = weakref.ref(ddp)
        self.is_wrapped = isinstance(ddp, DistributedDataParallel)
        self.group: Any = ddp.process_group if self.is_wrapped else None
        self.rank, self.world_size = member_of(self.group, "zcomm") if self.is_wrapped else (0, 1)
        named = trainable(ddp)
        self.device = device_of(named)
        self.streams = streams_of(self.device)
        self.engine: Engine | None = None
        met = self._meet(named, compared or {})
        self._given, self.auto = settings, self._automatic(met, named)
        if self.auto is not None:
            self.settings = settings = self.settings_with(self.auto.choice)
        self._tell(met.grouped)
        self.feedback = ResidualStore(
            settings.residual_storage,
            self.device,
            double_buffered=scaler is not None,
            hosts=met.grouped,
            record_stream=self.streams.record_stream if self.streams else None,
        )
        self.buckets = Buckets(named, settings, self.rank, self.world_size, self.feedback)
        self.unreduced = Unreduced(named, frozen(ddp))
        self.observers = Observers()
        self.optimizer: weakref.ref[Any] | None = None  # with ZeRO
        if self.engine is not None:
            self.buckets.limited = self.engine.chunk_size
        self.scale = 1.0
        self._loss_scale = LossScale(scaler, self.streams, ddp)
        self._finite = DeviceFinite(self.streams) if self.streams else Finite()
        self._undecided = False  # whether the last step counts
        self._jobs: list[Job] = []
        self._watch_producers()
        if not self.is_wrapped:
            self._watch = BackwardWatch(named.values(), self._end_unwrapped_step)

    def _watch_producers(self) -> None:
        """Notes each parameter's backward() stream: its bucket may fill on another one."""
        if self.streams is not None:
            for p in self.buckets.named.values():
                p.register_post_accumulate_grad_hook(self.streams.note)  # type: ignore[no-untyped-call]

    def _end_unwrapped_step(self) -> None:
        self.step += 1
        self.observers.end_step()
        self.observers.raise_failure()

    def caller(self, what: str, group: Any) -> Caller:
        return super().caller(what, group) if self.is_wrapped else LoneCaller(what, group, 0.0)

    def _meet(self, named: Mapping[str, Tensor], compared: Mapping[str, str]) -> Met:
        """Compares settings with all ranks, and makes the engine."""
        if not self.is_wrapped:
            return Met("", [this_host()], None)
        shapes = {n: (p.numel(), self.settings.spec_of(n, p.numel())) for n, p in named.items()}
        mine = {**self.settings.compared(), **compared}
        mine |= {"scaler": str(self._scaler is not None), "parameters": repr(shapes)}
        mine |= {"device": self.device.type, "deterministic": deterministic(self.settings)}
        if self.world_size > 1:
            expect_sender(self.device, self.group, f"rank {self.rank}: zcomm")
        caller = self.caller(self._what, self.group)
        met = meet(mine, self.settings.hierarchy, caller, self.rank, self.device)
        if self.world_size > 1:
            self.engine = self._make_engine(caller, met.name, self.streams, met.grouped)
        return met

    def _automatic(self, met: Met, named: Mapping[str, Tensor]) -> AutoCodec | None:
        """What takes the place of codec="auto"; all ranks measure."""
        if not self.settings.is_auto:
            return None
        ranks, ddp = Ranks(self.rank, met.hosts, met.grouped), self.ddp()
        sent = NO_GRADIENTS
        if self.is_wrapped:
            sent = expected_gradients(ddp, named, self.settings, self.kind)
        caller = self.caller(self._what, self.group)
        return AutoCodec(self.engine, ranks, caller, self.settings, self.device, sent)

    def _tell(self, hosts: Hosts | None) -> None:
        """Says once, on rank 0, what was found and chosen."""
        if self.rank == 0 and hosts is not None:
            note(f"zcomm: {self._what}: ranks are summed inside each host first, {hosts}")
        if self.rank == 0 and self.auto is not None:
            note(f"zcomm: {self._what}: {self.auto.choice}")

    def settings_with(self, choice: Choice | None) -> Settings:
        """The settings, if "auto" had chosen so; None: as they are."""
        if choice is None:
            return self.settings
        return self._given.chosen(choice.codec, choice.chunk_mb)

    def specs_with(self, choice: Choice | None) -> dict[str, str]:
        """The codec of each parameter, in the same way."""
        settings, named = self.settings_with(choice), self.buckets.named.items()
        return {name: settings.codec_of(name, p.numel()).spec for name, p in named}

    def _feeds(self, item: Item) -> bool:
        return self.settings.mode(item.codec) is not False

    def use_codec(self, choice: Choice) -> None:
        """From now on: what codec="auto" has chosen. All ranks call it between steps."""
        assert self.auto is not None
        self.auto.choice = choice
        self.settings = self.settings_with(choice)
        self.buckets.use(self.settings)
        self.feedback.keep(name for name, i in self.buckets.items.items() if self._feeds(i))

    @property
    def sink(self) -> Sink | None:
        return self.buckets.sink

    def reduce(self, bucket: Any) -> Any:
        """Hands a bucket to the engine; the future holds it when all ranks' mean is in place."""
        buffer: Tensor = bucket.buffer()
        arguments.expect_tensor(buffer, "bucket")
        future: Any = self.streams.future() if self.streams else torch.futures.Future()
        with Range("zcomm::hook"):
            if bucket.index() == 0:
                self._begin_step()
            self._submit(bucket, buffer, future)
        if bucket.is_last() and not at_end_of_backward(self._before_ddp_is_done):
            # A rank that has joined (torch's Join) plays its part outside backward().
            self._end_step()
            self.raise_failure()
            self.observers.raise_failure()
        return future

    def _begin_step(self) -> None:
        if self.auto is not None:
            self.auto.begin_step(self.step, self._exposed_s)
        self._expect_whole_world()
        self._synchronize()
        self._finite.begin()
        self._jobs.clear()
        if self._scaler is not None:
            self._follow_scale()

    def _submit(self, bucket: Any, buffer: Tensor, future: Any) -> None:
        if self.auto is not None:
            self.auto.take_bucket(buffer.numel())
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
            if error is None and self._scaler is not None:
                self._finite.look(buffer)
            future.set_result(buffer)

        for part in parts:
            self._jobs.append(self._job(part, bucket.index(), buffer, accumulate, finish))
            if self.engine is not None:
                self.engine.submit(self._jobs[-1])
            else:
                _complete_alone(self._jobs[-1])

    def _job(self, part: Part, index: int, buffer: Tensor, accumulate: bool, finish: Any) -> Job:
        what = f"bucket {index} of step {self.step}"
        data = part.data(buffer, self.sink, accumulate)
        feedback = part.feedback[self.feedback.side] if part.feedback else None
        encoding = Encoding(1 / self.world_size, self.settings.verify, feedback)
        signature = f"{what}: {part.name}, loss scale {self.scale}"
        return Job(what, part.collective, part.chunks, data, encoding, signature, finish)

    def _before_ddp_is_done(self) -> None:
        """The end of backward(), before DDP takes the results."""
        self.wait(*self._jobs)
        self._end_step()
        if self.failed or self.observers.failed or self.sink or self.unreduced.names():
            # DDP must finish first, or it would be broken; then the error is raised.
            at_end_of_backward(self._after_ddp_is_done)

    def _after_ddp_is_done(self) -> None:
        if self.sink is not None:
            self.sink.end_backward()
        self.raise_failure()
        self.observers.raise_failure()
        self.unreduced.expect_none(self.rank)

    def _end_step(self) -> None:
        for job in self._jobs:
            job.wait()
        self._jobs.clear()
        if self._scaler is not None and not self.failed:
            # Owners see no sums but their own: ranks would differ about the step.
            exchange = None if self.sink is None else self.exchange
            self._finite.end(() if self.sink is None else self.sink.sums(), exchange)
        if self.failed:
            return
        self._undecided = True
        if self.streams is None:
            self._decide()
        else:
            self.streams.forget()
        self.step += 1
        self.unreduced.compare(self.buckets.reduced)
        self.buckets.end_step()
        self.observers.end_step()
        if self.auto is not None and self.auto.is_due:
            self._choose_again(self.auto)

    def _choose_again(self, auto: AutoCodec) -> None:
        before, choice = auto.choice, auto.decide_again(self.exchange, self.step)
        if self.failed or choice is None:
            return
        self.use_codec(choice)
        if self.rank == 0:
            kept = "" if choice.codec != before.codec else " (kept)"
            note(f"zcomm: step {self.step}: {choice}{kept}")

    def _decide(self) -> None:
        """The residuals of the last step count, if all of it was finite."""
        if self._undecided and self._finite.was():
            self.feedback.flip()
        self._undecided = False

    def _synchronize(self) -> None:
        """Learns what the device found in earlier steps; the current stream waits for them.

        On the CPU it is known at once. On a device the host waits here for what the last step
        enqueued, which is long done when the next one has its first bucket.
        """
        if self.streams is None:
            return
        if self.engine is not None:
            self.engine.synchronize()
        self.streams.wait_current(self.streams.done())
        self._decide()

    def synchronize(self) -> None:
        known = self.failed
        self._synchronize()
        if not known:
            self.raise_failure()

    def engines(self) -> Collection[Engine]:
        return () if self.engine is None else (self.engine,)

    def close(self) -> None:
        """Ends the engine: no bucket can be reduced any more."""
        try:
            self.synchronize()
        finally:
            if self.engine is not None:
                self.engine.stop()

    def remove(self) -> None:
        raise RuntimeError(
            "torch has no way to remove a comm hook from a DistributedDataParallel; wrap the "
            "module in a new one: ddp = DistributedDataParallel(ddp.module)"
        )

    def exchange(self, mine: Tensor) -> Tensor:
        """Every rank's fp64 numbers, in rank order. Ranks give equally many and get the same."""
        what = f"exchange of {mine.numel()} numbers in step {self.step}"
        return self.gather_runs(mine, even_bounds(mine.numel(), self.world_size), what)

    def gather_runs(self, mine: Tensor, bounds: tuple[int, ...], what: str) -> Tensor:
        """The fp32 or fp64 tensor of which rank r has bounds[r]:bounds[r + 1], uncompressed.

        Does not raise if the engine fails: raise_failure() does.
        """
        if self.engine is None:
            return mine
        items = [Item("", PLAIN, bounds[-1], 0, bounds)]
        size = self.engine.chunk_size(self.settings.chunk_size(self.world_size))
        raw = mine.dtype is torch.float64
        chunks = make_chunks(items, self.rank, self.world_size, size, raw)
        whole = torch.zeros(bounds[-1], dtype=mine.dtype, device=mine.device)
        self.engine.run(Job(what, ALL_GATHER, chunks, JobData(mine, whole), signature=what))
        return whole

    def sum_runs(self, mine: Tensor, bounds: tuple[int, ...], what: str) -> Tensor:
        """This rank's run of the sum of all ranks' fp32 tensors, uncompressed. Raises nothing."""
        assert self.engine is not None
        items = [Item("", PLAIN, bounds[-1], 0, bounds)]
        size = self.engine.chunk_size(self.settings.chunk_size(self.world_size))
        chunks = make_chunks(items, self.rank, self.world_size, size)
        run = mine.new_zeros(bounds[self.rank + 1] - bounds[self.rank])
        self.engine.run(Job(what, REDUCE_SCATTER, chunks, JobData(mine, run), signature=what))
        return run

    def _follow_scale(self) -> None:
        """Residuals are those of scaled gradients: they change with the scale."""
        scale = self._loss_scale.value()
        if scale != self.scale:
            if self.step:
                self.feedback.rescale(scale / self.scale)
            self.scale = scale

    def _expect_whole_world(self) -> None:
        ddp = self.ddp()
        if self.sink is not None and ddp is not None and is_joining(ddp):
            raise ValueError(
                f"rank {self.rank}: expected training without Join, got ZeroOptimizer inside "
                "it: a rank that has run out of data would miss step(), which all ranks must "
                "call; give all ranks as many batches, or use zcomm.compress"
            )
        if ddp is not None and not divides_by_all_ranks(ddp):
            raise ValueError(
                f"rank {self.rank}: expected Join with divide_by_initial_world_size=True, got "
                "False: zcomm's means and residuals are those of all ranks"
            )

    def choice(self) -> Choice | None:
        return None if self.auto is None else self.auto.choice

    def describe(self) -> str:
        return f"{self.settings.codec}, step {self.step}, {self.world_size} ranks"


def _complete_alone(job: Job) -> None:
    """In a world of one rank the bucket holds the sum already; a sink gets a copy."""
    if isinstance(job.data, SinkData):
        for index, chunk in enumerate(job.chunks):
            job.data.copy_source(index, chunk)
    job.complete()
