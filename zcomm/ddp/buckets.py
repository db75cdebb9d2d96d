"""Buckets: how each one travels. Codecs, owners and residuals belong to parameters, not to buckets;
a bucket's parts are what follows from them.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zcomm.base import arguments
from zcomm.ddp.parameters import items_of
from zcomm.engine.job import ALL_REDUCE, REDUCE_SCATTER, Collective, JobData, SinkData, SinkLayouts
from zcomm.sharding.chunks import Chunks, ChunkSize, Item, make_chunks
from zcomm.sharding.residual_store import BoundFeedback, Mode, ResidualStore
from zcomm.sharding.settings import PLAIN, Settings


class Sink(Protocol):
    """Keeps the gradients of the parameters in `shards` with their owners: no second hop."""

    @property
    def shards(self) -> Container[str]: ...

    def positions(self, dtype: torch.dtype) -> Mapping[str, int]:
        """Where this rank's run of each parameter lies in target()."""

    def target(self, dtype: torch.dtype) -> Tensor: ...

    def take(self, names: Sequence[str]) -> bool:
        """A bucket with these parameters is on its way; returns True to have its sums added."""

    def sums(self) -> Sequence[Tensor]:
        """All targets."""

    def end_backward(self) -> None:
        """All gradients are in place, and DDP is done."""


@dataclass
class Part:
    """Parameters of a bucket that take the same route, and their residuals for each side."""

    items: list[Item]
    chunks: Chunks
    feedback: list[BoundFeedback] | None
    sink_layouts: SinkLayouts | None  # where its sums go, with a sink
    name: str

    @property
    def collective(self) -> Collective:
        return ALL_REDUCE if self.sink_layouts is None else REDUCE_SCATTER

    def data(self, buffer: Tensor, sink: Sink | None, accumulate: bool) -> JobData:
        if self.sink_layouts is None:
            return JobData(buffer, buffer)
        assert sink is not None
        return SinkData(buffer, sink.target(buffer.dtype), self.sink_layouts, accumulate)


class Buckets:
    """The parts of one model's buckets, made when a bucket is first seen."""

    def __init__(
        self,
        named: Mapping[str, Tensor],
        settings: Settings,
        rank: int,
        world_size: int,
        feedback: ResidualStore,
    ) -> None:
        self.named, self.settings = named, settings
        self.rank, self.world_size = rank, world_size
        self.two_hops = settings.two_hops(feedback.hosts)
        hosts = feedback.hosts
        self._owners = range(world_size) if hosts is None else hosts.owners
        self.items = items_of(named, settings, world_size)
        self.feedback = feedback
        self.sink: Sink | None = None
        self.limited: Callable[[ChunkSize], ChunkSize] = lambda size: size  # the engine's limits
        self._names = {id(p): name for name, p in named.items()}
        self._parts: dict[tuple[int, ...], list[Part]] = {}
        self._used: set[tuple[int, ...]] = set()

    def parts(self, bucket: Any, buffer: Tensor, step: int) -> list[Part]:
        """What of the bucket goes to all ranks, and what goes to the sink."""
        warming_up = step < self.settings.start_step
        key = (warming_up, *map(id, bucket.parameters()))
        self._used.add(key)
        if key not in self._parts:
            self._parts[key] = self._make_parts(bucket, buffer, warming_up)
        return self._parts[key]

    def sunk_names(self, bucket: Any) -> list[str]:
        """The parameters of a bucket that go to the sink."""
        names = map(self._name, bucket.parameters())
        return [name for name in names if self._goes_to_sink(name)]

    def end_step(self) -> None:
        """Drops buckets that this step did not use: they are from before DDP's rebuild."""
        self._parts = {key: parts for key, parts in self._parts.items() if key in self._used}
        self._used.clear()

    def reduced(self) -> set[int]:
        """The ids of the parameters in the buckets of this step."""
        return {number for _, *numbers in self._used for number in numbers}

    def use(self, settings: Settings) -> None:
        """Other codecs with blocks of the same size, from the next bucket on."""
        self.settings = settings
        before, self.items = self.items, items_of(self.named, settings, self.world_size)
        assert all(before[name].bounds == item.bounds for name, item in self.items.items())
        self.forget()

    def forget(self) -> None:
        """The sink has changed: parts are made again."""
        self._parts.clear()

    def hold_all(self) -> None:
        """Makes residuals for every parameter, also for those no bucket has brought yet."""
        for item in self.items.values():
            if self._mode(item) and self.named[item.key].dtype is not torch.float64:
                gather = not self._goes_to_sink(item.key)
                self.feedback.hold([item], self.rank, gather, self._owners)

    def _make_parts(self, bucket: Any, buffer: Tensor, warming_up: bool) -> list[Part]:
        shared: list[Item] = []
        sunk: list[Item] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
            # Where it lies in memory, whatever order DDP has put it in.
            offset = (gradient.data_ptr() - buffer.data_ptr()) // buffer.element_size()
            item = self.items[self._name(parameter)]._replace(offset=offset)
            if warming_up or buffer.dtype is torch.float64:
                item = item._replace(codec=PLAIN)
            (sunk if self._goes_to_sink(item.key) else shared).append(item)
        ways = ((shared, None), (sunk, self.sink))
        return [self._make_part(items, buffer.dtype, sink) for items, sink in ways if items]

    def _make_part(self, items: list[Item], dtype: torch.dtype, sink: Sink | None) -> Part:
        raw = dtype is torch.float64
        size = self.limited(self.settings.chunk_size(self.world_size))
        chunks = make_chunks(items, self.rank, self.world_size, size, raw, self.two_hops)
        bound = None
        if not raw and self.world_size > 1 and any(self._mode(item) for item in items):
            bound = self.feedback.bind(chunks, self.rank, self._mode, gather=sink is None)
        layouts = None
        if sink is not None:
            positions = sink.positions(dtype)
            layouts = SinkLayouts(chunk.sink_layout(positions) for chunk in chunks)
        specs = ", ".join(sorted({item.codec.spec for item in items}))
        numel = sum(item.numel for item in items)
        name = f"{len(items)} parameters, {numel} {dtype} elements as {specs}"
        return Part(items, chunks, bound, layouts, name)

    def _goes_to_sink(self, name: str) -> bool:
        return self.sink is not None and name in self.sink.shards

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
