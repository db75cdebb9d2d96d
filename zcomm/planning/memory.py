"""zcomm.plan: the memory of a training run, before it starts.

It takes the rules of the run itself: who owns what, shards and residuals of parameters without
storage (torch's meta device), and chunks, of which it knows only the sizes (chunk_sizes.py). Owners
that own as much are counted together, so the number of ranks does not matter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zcomm.base import arguments
from zcomm.codecs import Codec
from zcomm.planning import buffer_memory
from zcomm.planning.buffer_memory import BufferBytes, LocalGradients, Named, nbytes_of
from zcomm.planning.chunk_sizes import Owned, owners_of
from zcomm.planning.optimizer_memory import optimizer_class, optimizer_memory
from zcomm.sharding.chunks import Item, piece_limit
from zcomm.sharding.hierarchy import Hierarchy
from zcomm.sharding.settings import SETTING_NAMES, Settings
from zcomm.torch_private.ddp import uncompiled, uncompiled_name
from zcomm.transport.shared_memory.ring import segment_nbytes
from zcomm.zero.elementwise import OptimizerSpec
from zcomm.zero.parameter_gather import needs_master
from zcomm.zero.shards import GradientShards, Shard

# A parameter count stands for this many tensors of equal size.
_TENSORS = 64
OPTIONS = {"lr": 3e-4}  # of an optimizer that is given without its own
_MOST_PARAMETERS = 1e15  # torch counts bytes in 63 bits


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank.

    parameters   the model's, including frozen ones
    gradients    DDP's buckets; with ZeRO also the sums that this rank owns
    optimizer    its state
    masters      fp32 copies of what this rank owns, if parameters are gathered with loss
    residuals    what compression has left out so far
    buffers      for chunks in flight
    transient    the extra at the peak of a step: local gradients, the optimizer's temporaries

    `total` is in use between steps (after zero_grad); `peak` is the maximum from the first step on.
    Not included: activations, the model's own buffers, what torch, gloo and Python need, and
    gradients accumulated with no_sync(), which stay in full until they are sent.
    """

    parameters: int
    gradients: int
    optimizer: int
    masters: int
    residuals: int
    buffers: int
    transient: int

    @property
    def total(self) -> int:
        return self.peak - self.transient

    @property
    def peak(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        names = [field.name for field in fields(self) if field.name != "transient"]
        rows = [(name, getattr(self, name)) for name in [*names, "total", "peak"]]
        return "\n".join(f"{name:<12}{_readable(nbytes):>12}" for name, nbytes in rows)


def plan(
    model: nn.Module | float,
    world_size: int,
    stage: int = 1,
    codec: Any = "lm4",
    optimizer: Any = "adamw",
    dtype: torch.dtype | str | None = None,
    *,
    param_codec: Any = None,
    rank: int | None = None,
    scaler: Any = None,
    bucket_cap_mb: float | None = None,
    gradient_as_bucket_view: bool = False,
    one_host: bool = False,
    **arguments_: Any,
) -> MemoryPlan:
    """The bytes that training needs on each rank; needs no process group and no memory itself.

    `model` is a module on any device, or a number of parameters (in large tensors). Stage 0 is DDP
    with zcomm.compress (codec None: DDP alone), stage 1 zcomm.ZeroOptimizer. `optimizer` is a name
    or a class. Settings of zcomm.compress count; what is no setting goes to the optimizer, as with
    ZeroOptimizer. `dtype` is that of the parameters, if not the model's own. Without `rank` it is
    the plan of the rank that needs most. With `one_host` all ranks share a host, and its memory.
    """
    world_size = arguments.count(world_size, "world_size", least=1)
    _expect_stage(stage, codec, param_codec)
    if isinstance(codec, Hierarchy):
        raise TypeError(
            "plan: expected codec as a codec or patterns, got a Hierarchy: plans are those of one "
            "hop; give its across codec, and divide `residuals` by the ranks per host"
        )
    given = {name: arguments_.pop(name) for name in SETTING_NAMES if name in arguments_}
    settings = Settings("none" if codec is None else codec, **given)
    every, trained = _parameters(model, dtype)
    _expect_sendable(trained)
    rank = None if rank is None else _rank(rank, world_size)
    owners = owners_of(trained, settings, world_size, rank)
    run = _Run(
        trained,
        settings,
        None if param_codec is None else Settings(param_codec, min_numel=settings.min_numel),
        world_size,
        sharded=stage == 1,
        compressed=codec is not None and world_size > 1,
        sides=1 if scaler in (None, False) else 2,
        owned=owners.parameters,
        rank=owners.rank,
        one_host=one_host,
    )
    local = LocalGradients(trained, bucket_cap_mb, gradient_as_bucket_view)
    return run.plan(nbytes_of(every), local, optimizer_class(optimizer), {**OPTIONS, **arguments_})


class _Run(NamedTuple):
    """The parameters of one rank, and what becomes of them."""

    trained: Named
    settings: Settings
    param_settings: Settings | None
    world_size: int
    sharded: bool
    compressed: bool
    sides: int
    owned: Mapping[str, Owned]
    rank: int
    one_host: bool

    def plan(
        self, parameters: int, local: LocalGradients, kind: Any, options: Mapping[str, Any]
    ) -> MemoryPlan:
        shards = self._shards(self.trained, self.owned) if self.sharded else []
        updated = [s.tensor for s in shards] if self.sharded else list(self.trained.values())
        state, step = _optimizer_nbytes(kind, options, updated, self.sharded)
        buffers = self._buffers(local.bucket) if self.compressed else BufferBytes(0, 0, 0, 0)
        residuals = self._residuals(buffers.longest_chunk) if self.compressed else 0
        masters = sum(s.tensor.nbytes for s in shards if s.has_master)
        gradients = nbytes_of(self.trained) + _sums_nbytes(shards)
        before = gradients + masters
        lasting = before + residuals + state + buffers.nbytes
        if self.sharded:
            # Iteration 0 has one bucket, and nothing else until that is on its way.
            early = before + buffers.shared_nbytes + local.whole
            most = max(early, lasting + local.in_bucket + buffers.encode_nbytes)
        else:
            most = lasting + local.whole + buffers.encode_nbytes
        most = max(most, lasting + step + (0 if self.sharded else local.kept))
        return MemoryPlan(
            parameters, gradients, state, masters, residuals, buffers.nbytes, most - lasting
        )

    def _shards(self, named: Named, owned: Mapping[str, Owned]) -> list[Shard]:
        shards = [_shard(name, p, owned[name]) for name, p in named.items()]
        for shard in shards:
            if needs_master(self.param_settings, shard):
                shard.make_master()
        return shards

    def _buffers(self, bucket: Named) -> BufferBytes:
        traffic = buffer_memory.Traffic(
            self.settings, self.param_settings, self.rank, self.world_size, self.one_host
        )
        gradients = traffic.gradients(self.trained, bucket, self.sharded)
        parameters = traffic.parameters(self.trained, self._shards) if self.sharded else ()
        shared_nbytes = segment_nbytes(self.world_size) if self.one_host else 0
        return buffer_memory.buffers_of(list(gradients), list(parameters), shared_nbytes)

    def _residuals(self, longest_chunk: int) -> int:
        """Of what this rank sends and, without ZeRO, of the sums it sends back."""
        modes = {name: self.settings.mode(one.codec) for name, one in self.owned.items()}
        numel = 0
        for name, one in self.owned.items():
            if modes[name] is False or self.trained[name].dtype is torch.float64:
                continue
            own = 0 if self.sharded else self._residual_numel(one.codec, one.stop - one.start)
            numel += own + sum(
                (stop - start) * self._residual_numel(one.codec, run)
                for start, stop, run in one.shares
            )
        scratch = any(isinstance(mode, float) for mode in modes.values())
        numel = numel * self.sides + (longest_chunk if scratch else 0)
        return numel * self.settings.residual_storage.itemsize

    def _residual_numel(self, codec: Codec, run: int) -> int:
        """Of one owner's run, piece by piece."""
        limit = piece_limit(codec, self.world_size)
        pieces, rest = divmod(run, limit)
        dtype = self.settings.residual_storage
        last = codec.residual_numel(rest, dtype) if rest else 0
        return pieces * codec.residual_numel(limit, dtype) + last


def _shard(name: str, p: Tensor, owned: Owned) -> Shard:
    """A shard of a world that has no other ranks, with this rank's run."""
    return Shard(name, p, Item(name, owned.codec, owned.numel, 0, (owned.start, owned.stop)), 0)


def _optimizer_nbytes(
    kind: Any, options: Mapping[str, Any], tensors: list[Tensor], flat: bool
) -> tuple[int, int]:
    """Bytes of the state for these tensors, and of a step's temporaries."""
    if flat:
        OptimizerSpec(kind, options).state_kinds({})
    state = step = 0
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        sizes = [t.numel() for t in tensors if t.dtype is dtype]
        found = optimizer_memory(kind, options, dtype, flat)
        state += found.state_nbytes(sizes)
        step = max(step, found.step_nbytes(sizes))
    return state, step


def _rank(rank: Any, world_size: int) -> int:
    if arguments.count(rank, "rank") >= world_size:
        raise ValueError(f"rank: expected less than world_size {world_size}, got {rank}")
    return int(rank)


def _sums_nbytes(shards: list[Shard]) -> int:
    gradients = GradientShards(lambda: None, False)
    with torch.device("meta"):
        gradients.add(shards)
    return sum(gradients.target(dtype).nbytes for dtype in (torch.float32, torch.float64))


def _parameters(model: Any, dtype: torch.dtype | str | None) -> tuple[Named, Named]:
    """All parameters, and the trained ones, without storage."""
    dtype = None if dtype is None else arguments.dtype_of(dtype, "dtype")
    if isinstance(model, nn.Module):
        module = uncompiled(model)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        named = {uncompiled_name(name): p for name, p in module.named_parameters()}
        every = {name: _without_memory(p, dtype) for name, p in named.items()}
        return every, {name: p for name, p in every.items() if named[name].requires_grad}
    every = _of_count(model, dtype or torch.float32)
    return every, every


def _without_memory(p: Tensor, dtype: torch.dtype | None) -> Tensor:
    wanted = dtype if dtype is not None and p.is_floating_point() else p.dtype
    return torch.empty_strided(p.shape, p.stride(), dtype=wanted, device="meta")


def _of_count(count: Any, dtype: torch.dtype) -> Named:
    if isinstance(count, bool) or not isinstance(count, (int, float)):
        raise TypeError(
            f"model: expected a module or a number of parameters, got {arguments.describe(count)}"
        )
    if not 1 <= count <= _MOST_PARAMETERS or int(count) != count:
        raise ValueError(f"model: expected a whole number of parameters up to 1e15, got {count}")
    each, longer = divmod(int(count), _TENSORS)
    sizes = [each + (i < longer) for i in range(_TENSORS)]
    return {f"{i}": torch.empty(n, dtype=dtype, device="meta") for i, n in enumerate(sizes) if n}


def _expect_stage(stage: Any, codec: Any, param_codec: Any) -> None:
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(f"stage: expected 0 or 1, got {arguments.describe(stage)}")
    if stage > 1:
        raise ValueError(f"stage: expected 0 or 1, got {stage}: plans of FSDP2 are not there yet")
    if stage == 1 and codec is None:
        raise ValueError("codec: expected one at stage 1, got None; use 'none' for exact gradients")
    if stage == 0 and param_codec is not None:
        raise ValueError(
            f"param_codec: expected None at stage 0, got {param_codec!r}: there every rank updates "
            "all parameters itself; use stage=1"
        )


def _expect_sendable(trained: Named) -> None:
    for name, p in trained.items():
        if p.dtype not in arguments.SENT_DTYPES:
            known = arguments.dtype_names(arguments.SENT_DTYPES)
            raise ValueError(f"parameter {name!r}: expected dtype {known}, got {p.dtype}")


def _readable(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"
