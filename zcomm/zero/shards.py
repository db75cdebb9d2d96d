"""Shards: this rank's runs of parameters and of their gradients.

| attribute of a shard | |
| --- | --- |
| `flat`   | all of the parameter's memory, as one dimension |
| `tensor` | what the optimizer updates: this rank's run of `flat`, or an fp32 master of that run |
| `sum`    | this rank's run of the gradient, in fp32 (fp64 for fp64 parameters) |
| `gradient` | the tensor in `p.grad` |

There is a master where the run itself is not precise enough: for bf16 and fp16 parameters, and for
parameters that are gathered with a codec.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from zcomm.sharding.chunks import Item
from zcomm.torch_private.tensors import version
from zcomm.zero.sharded_gradient import ShardedGradient, Unscale

_ALIGNMENT = 16  # elements: a cache line of fp32


class Shard:
    """This rank's run, elements [start, stop), of one parameter."""

    def __init__(self, name: str, parameter: Tensor, item: Item, rank: int) -> None:
        self.name, self.parameter, self.item = name, parameter, item
        self.start, self.stop = item.bounds[rank], item.bounds[rank + 1]
        self.has_master = False
        # The run in a loaded checkpoint, until the next step: if the model is loaded after the
        # optimizer, that does not count as a change.
        self.loaded_run: Tensor | None = None
        self.flat = flat_memory(name, parameter)
        self._form = _form(parameter)
        self._address = self.flat.data_ptr()  # a number, because a storage can move
        self.tensor = self.run
        self.sum = torch.empty(0, device=self.flat.device)
        self.gradient: ShardedGradient
        self.mark_unchanged()

    def make_master(self) -> None:
        self.tensor = self.run.to(torch.float32, copy=True)
        self.has_master = True

    @property
    def run(self) -> Tensor:
        """This rank's run of the parameter itself."""
        return self.flat[self.start : self.stop]

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def changed(self) -> bool:
        """Whether someone wrote to the parameter, or moved it, since mark_unchanged()."""
        return version(self.parameter) != self._version or self.moved()

    def moved(self) -> bool:
        return self.parameter.data_ptr() != self._address

    def mark_unchanged(self) -> None:
        """Later changes of the parameter count from here."""
        self._version = version(self.parameter)

    def rebind(self) -> None:
        """Follows the parameter to other memory; the optimizer's tensor remains the same object."""
        form = _form(self.parameter)
        if form != self._form:
            raise ValueError(
                f"parameter {self.name!r}: expected the shape, strides and dtype that it had when "
                f"the optimizer was made, {self._form}, got {form}; change them before wrapping "
                "the model, and make the optimizer after that"
            )
        if self.moved():
            self.flat = flat_memory(self.name, self.parameter)
            self._address = self.flat.data_ptr()
            if not self.has_master:
                self.tensor.data = self.run

    def update_master(self) -> None:
        """Sets the master to the parameter's values, unless they come from the master."""
        known = self.tensor.to(self.flat.dtype) if self.loaded_run is None else self.loaded_run
        if self.has_master and not torch.equal(known, self.run):
            self.tensor.copy_(self.run)


class GradientShards:
    """The sums of gradients that this rank owns: the sink of the hook's reduce-scatter."""

    def __init__(self, unscale: Unscale, bucket_views: bool = False) -> None:
        self.shards: dict[str, Shard] = {}
        self._bucket_views = bucket_views  # DDP expects its own views in p.grad
        self._hidden: list[Shard] = []
        self._unscale = unscale
        self._positions: dict[torch.dtype, dict[str, int]] = {}
        self._sums: dict[torch.dtype, Tensor] = {}

    def add(self, shards: Iterable[Shard]) -> None:
        """Allocates the sums of more parameters; existing sums keep their values."""
        self.shards |= {shard.name: shard for shard in shards}
        before = {name: s.sum for name, s in self.shards.items() if s.sum.numel()}
        for dtype in (torch.float32, torch.float64):
            self._allocate(
                dtype, [s for s in self.shards.values() if _sum_dtype(s.flat.dtype) is dtype]
            )
        for name, values in before.items():
            self.shards[name].sum.copy_(values)

    def _allocate(self, dtype: torch.dtype, shards: Sequence[Shard]) -> None:
        positions, end = {}, 0
        for shard in shards:
            positions[shard.name] = end
            end += -(-shard.numel // _ALIGNMENT) * _ALIGNMENT
        self._positions[dtype] = positions
        device = shards[0].flat.device if shards else torch.device("cpu")
        self._sums[dtype] = torch.zeros(end, dtype=dtype, device=device)
        for shard in shards:
            at = positions[shard.name]
            shard.sum = self._sums[dtype][at : at + shard.numel]
            if hasattr(shard, "gradient"):
                shard.gradient.shard = shard.sum
            else:
                shard.gradient = ShardedGradient(
                    shard.name, shard.parameter, shard.sum, self._unscale
                )

    def reduced(self, shard: Shard, rank: int) -> Tensor | None:
        """What the optimizer takes as the gradient of a shard; refuses this rank's own gradient."""
        grad = shard.parameter.grad
        if grad is None:
            return None
        if grad is not shard.gradient or shard.gradient.local is not None:
            raise RuntimeError(
                f"rank {rank}: step: expected gradients that were reduced, got this rank's own "
                f"gradient of parameter {shard.name!r}; run the last backward() before step() "
                "outside no_sync(), leave p.grad to zcomm, and add param groups after zero_grad()"
            )
        return shard.sum

    # The sink of the hook.

    def positions(self, dtype: torch.dtype) -> Mapping[str, int]:
        return self._positions[_sum_dtype(dtype)]

    def target(self, dtype: torch.dtype) -> Tensor:
        return self._sums[_sum_dtype(dtype)]

    def take(self, names: Sequence[str]) -> bool:
        """Drops local gradients: the bucket has them. True if it must be added to the sums."""
        shards = [self.shards[name] for name in names]
        kept = [_keeps_sum(shard) for shard in shards]
        for shard, keeps in zip(shards, kept):
            if any(kept) and not keeps:
                shard.sum.zero_()
            shard.gradient.local = None
            shard.gradient.in_backward = True
            # None: this rank did not use it. DDP finds out whether another rank did.
            if shard.parameter.grad is not None and not self._bucket_views:
                shard.parameter.grad = shard.gradient
        return any(kept)

    def hide(self) -> None:
        """Call this before a forward pass, which may rebuild DDP's buckets: with bucket views, DDP
        would fill the new ones from p.grad, as after a backward()."""
        self._hidden = [s for s in self.shards.values() if s.parameter.grad is s.gradient]
        for shard in self._hidden:
            shard.parameter.grad = None

    def show(self) -> None:
        for shard in self._hidden:
            shard.parameter.grad = shard.gradient
        self._hidden = []

    def sums(self) -> list[Tensor]:
        return list(self._sums.values())

    def end_backward(self) -> None:
        for shard in self.shards.values():
            gradient = shard.gradient
            gradient.zeroed = gradient.reduced_twice = gradient.in_backward = False
            grad = shard.parameter.grad
            # None: no rank used the parameter.
            if grad is not None and grad is not gradient:
                shard.parameter.grad = gradient


class OwnGradients(GradientShards):
    """In a world of one process, for an unwrapped model: p.grad is whole, an ordinary tensor."""

    def add(self, shards: Iterable[Shard]) -> None:
        self.shards |= {shard.name: shard for shard in shards}

    def reduced(self, shard: Shard, rank: int) -> Tensor | None:
        p = shard.parameter
        if p.grad is None:
            return None
        if p.grad.stride() != p.stride():  # somebody else made it
            p.grad = torch.empty_like(p).copy_(p.grad)
        shard.sum = p.grad.detach().as_strided((p.numel(),), (1,))
        return shard.sum.to(shard.tensor.dtype)


def flat_memory(name: str, p: Tensor) -> Tensor:
    """A parameter's memory as one dimension; refuses gaps and overlaps."""
    with torch.no_grad():
        dense, expected = p.detach(), 1
        for size, stride in sorted(zip(p.shape, p.stride()), key=lambda pair: pair[1]):
            if size > 1 and stride != expected:
                raise ValueError(
                    f"parameter {name!r}: expected dense memory, got shape {tuple(p.shape)} with "
                    f"strides {p.stride()}; use p.data = p.data.contiguous() before wrapping"
                )
            expected *= size
        return dense.as_strided((p.numel(),), (1,))


def _form(p: Tensor) -> tuple[object, ...]:
    return tuple(p.shape), p.stride(), p.dtype


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _keeps_sum(shard: Shard) -> bool:
    """Whether the sum is still needed: there was no zero_grad() since it was made."""
    gradient = shard.gradient
    not_zeroed = shard.parameter.grad is gradient and not gradient.zeroed
    return gradient.reduced_twice or not_zeroed
