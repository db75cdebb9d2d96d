"""Times collectives on every rank, for `zcomm bench` and the benchmarks.

In every round all codecs of a collective take turns with the backend's own collective, each after a
barrier. A size is that of the whole fp32 buffer: what all_reduce reduces, reduce_scatter reads and
all_gather writes. Every result of every round is compared with the exact one, outside the timing.
"""

import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from zcomm.engine.tuning.cost import OWN

FLAT = "flat"
_PART = 1 << 20


class Key(NamedTuple):
    """A collective and its codec: OWN for the backend's own, local/across for a codec inside hosts,
    flat/across for one hop where there would be two."""

    kind: str
    codec: str

    @property
    def is_flat(self) -> bool:
        return self.codec.startswith(f"{FLAT}/")

    @property
    def local(self) -> str:
        """The codec inside a host, if one is given."""
        return "" if self.is_flat else self.codec.rpartition("/")[0]

    @property
    def across(self) -> str:
        return self.codec.rpartition("/")[2]


class Timing(NamedTuple):
    """One collective in one round on one rank."""

    s: float
    cpu_s: float  # of all threads of the process
    sent: float  # bytes at the interface, if counted
    error: float
    digest: int


# One rank: a timing for each round.
Timings = dict[Key, list[Timing]]
Count = Callable[[], float]


class Task(NamedTuple):
    """A collective to time: call `reset` before it; `result` after it should equal `exact`."""

    reset: Callable[[], object]
    run: Callable[[], object]
    result: Callable[[], Tensor]
    exact: Tensor


class BenchTensors:
    """The tensors that all codecs share at one size. Every rank knows every rank's input."""

    def __init__(self, rank: int, world_size: int, nbytes: int, group: Any = None) -> None:
        self.world_size, self.group = world_size, group
        shard_numel = shard_numel_of(nbytes, world_size)
        self.mean = torch.zeros(shard_numel * world_size)
        for peer in range(world_size):
            x = torch.randn(self.mean.numel(), generator=torch.Generator().manual_seed(peer))
            self.mean += x
            if peer == rank:
                self.input = x
        self.mean /= world_size
        self.whole = torch.empty_like(self.mean)
        self.shard = torch.empty(shard_numel)
        self.mean_shard = self.mean.view(world_size, -1)[rank]

    def task(self, key: Key) -> Task:
        kind, whole, shard = key.kind, self.whole, self.shard
        run, forget = self._collective(key)
        # The backend sums. Its result is divided outside the timing.
        divisor = self.world_size if key.codec == OWN and kind != "all_gather" else 1

        def start_from(reset: Callable[[], object]) -> Callable[[], object]:
            return lambda: (reset(), forget())

        if kind == "all_reduce":
            reset = start_from(partial(whole.copy_, self.input))
            return Task(reset, partial(run, whole), lambda: whole.div_(divisor), self.mean)
        if kind == "reduce_scatter":
            run = partial(run, shard, self.input)
            return Task(start_from(shard.zero_), run, lambda: shard.div_(divisor), self.mean_shard)
        run = partial(run, whole, self.mean_shard)
        return Task(start_from(whole.zero_), run, lambda: whole, self.mean)

    def _collective(self, key: Key) -> tuple[Callable[..., object], Callable[[], object]]:
        """The call, and a function that clears its residuals, so that all rounds send the same."""
        if key.codec == OWN:
            return partial(own_collective(key.kind), group=self.group), lambda: None
        codec: Any = zcomm.Hierarchy(key.local, key.across) if key.local else key.across
        if key.is_flat:
            codec = zcomm.Hierarchy(across=key.across, hosts=1)
        run = partial(getattr(zcomm, key.kind), codec=codec, group=self.group)
        if not zcomm.codec(key.across).needs_feedback:
            return run, lambda: None
        feedback = zcomm.Feedback()
        return partial(run, feedback=feedback), partial(feedback.rescale, 0.0)


def own_collective(kind: str) -> Callable[..., object]:
    """torch's collective; two of them have other names in older versions."""
    names = {
        "all_reduce": ("all_reduce",),
        "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
        "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    }[kind]
    found: Callable[..., object] = next(getattr(dist, n) for n in names if hasattr(dist, n))
    return found


def shard_numel_of(nbytes: int, world_size: int) -> int:
    """Elements of one rank's part; sizes are rounded down to a multiple of the ranks."""
    return max(nbytes // 4 // world_size, 1)


def normalized_error(x: Tensor, exact: Tensor) -> float:
    # In parts: temporaries of the full size would cost more than the collective.
    total = size = 0.0
    for a, b in zip(torch.split(x, _PART), torch.split(exact, _PART)):
        total += float((a - b).square().sum(dtype=torch.float64))
        size += float(b.square().sum(dtype=torch.float64))
    return total / size


def digest(x: Tensor) -> int:
    """A sum of the bits: equal tensors have equal digests, others almost never."""
    return int(x.view(torch.int32).sum(dtype=torch.int64))


def timed(task: Task, count: Count, group: Any) -> Timing:
    """After the second barrier all peers have received, so the interface has counted it all."""
    task.reset()
    sent = count()
    dist.barrier(group)
    cpu, start = time.process_time(), time.perf_counter()
    task.run()
    s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    dist.barrier(group)
    sent = count() - sent
    result = task.result()
    return Timing(s, cpu_s, sent, normalized_error(result, task.exact), digest(result))


@lru_cache
def group_of(backend: str) -> Any:
    """All ranks over a backend: the default group (None), or one created at first use."""
    return None if backend == dist.get_backend() else dist.new_group(backend=backend)


def measure(
    rank: int,
    world_size: int,
    nbytes: int,
    keys: Sequence[Key],
    rounds: int,
    backend: str,
    count: Count = lambda: 0.0,
) -> Timings:
    """Runs on every rank. The first round warms up and is not counted."""
    group = group_of(backend)
    tensors = BenchTensors(rank, world_size, nbytes, group)
    tasks = {key: tensors.task(key) for key in keys}
    turns = [
        {key: timed(task, count, group) for key, task in tasks.items()} for _ in range(rounds + 1)
    ]
    return {key: [turn[key] for turn in turns[1:]] for key in keys}
