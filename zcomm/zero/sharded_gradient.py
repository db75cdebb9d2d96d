"""ShardedGradient: what `p.grad` is under ZeRO.

No rank has the whole gradient: each owner has its run. An ordinary tensor in `p.grad` would be this
rank's local gradient, which looks right and is wrong. A ShardedGradient has no memory, and reading
it raises an error with a remedy. The operations of a usual training loop work:

| operation               | who calls it                        | what it does here               |
| ----------------------- | ----------------------------------- | ------------------------------- |
| `zero_`, `_foreach_zero_` | zero_grad(set_to_none=False)      | sets the shard to zero          |
| `add_`                  | a backward() before zero_grad()     | keeps that gradient separate    |
| `copy_` from it         | DDP fills a bucket                  | copies that gradient only       |
| `copy_` to it           | DDP empties a bucket                | nothing                         |
| `_amp_foreach_...`      | GradScaler.unscale_(), .step()      | unscales shards; ranks agree    |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zcomm.torch_private import foreach
from zcomm.torch_private.autograd import graph_task_id
from zcomm.torch_private.tensors import no_torch_function, without_memory

_aten = torch.ops.aten
# Returns the function that unscales, or None if its owner is gone. The reference is weak: Python's
# collector does not look into p.grad, so a strong one would keep the optimizer alive forever.
Unscale = Callable[[], Callable[[Sequence["ShardedGradient"], Tensor, Tensor], None] | None]


class ShardedGradient(Tensor):
    """Stands for the gradient of one parameter; `shard` is the run that this rank owns."""

    shard: Tensor
    of: str  # the parameter's name
    unscale: Unscale
    local: Tensor | None  # this rank's own gradient, not reduced yet
    zeroed: bool  # by zero_grad(set_to_none=False)
    reduced_twice: bool  # DDP took `local` while the shard was still needed
    in_backward: bool  # DDP may empty its bucket into it

    @staticmethod
    def __new__(cls, name: str, p: Tensor, shard: Tensor, unscale: Unscale) -> ShardedGradient:
        made: ShardedGradient = without_memory(
            cls, p.size(), strides=p.stride(), dtype=p.dtype, device=p.device
        )
        made.of, made.shard, made.unscale = name, shard, unscale
        made.local, made.zeroed, made.reduced_twice, made.in_backward = None, False, False, False
        return made

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = _KNOWN.get(func)
        if known is None or kwargs:
            raise RuntimeError(_refusal([*args, *(kwargs or {}).values()]))
        return known(*args)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<zcomm: gradient of {self.of!r}, sharded; see opt.full_grad(p)>"

    def _no_memory(self, *_: object, **__: object) -> Any:
        raise RuntimeError(_refusal([self]))

    # These bypass the dispatcher and would use an invalid address.
    data_ptr = untyped_storage = storage = share_memory_ = is_shared = _no_memory

    def add_local(self, gradient: Tensor) -> None:
        self.local = gradient.clone() if self.local is None else self.local.add_(gradient)

    def fill(self, bucket_view: Tensor) -> None:
        """Gives DDP this rank's own gradient. Only backward() may ask for it."""
        if graph_task_id() < 0:
            raise RuntimeError(_refusal([self]))
        if self.local is None:
            bucket_view.zero_()
        else:
            bucket_view.copy_(self.local)
        self.local = None
        self.reduced_twice = not self.zeroed

    def zero(self) -> None:
        self.shard.zero_()
        self.local, self.zeroed = None, True


def _add(into: Any, gradient: Tensor) -> Any:
    if not isinstance(into, ShardedGradient) or isinstance(gradient, ShardedGradient):
        raise RuntimeError(_refusal([into, gradient]))
    into.add_local(gradient)
    return into


def _copy(into: Tensor, source: Tensor, *_: Any) -> Tensor:
    if isinstance(source, ShardedGradient):
        source.fill(into)
    elif isinstance(into, ShardedGradient) and not into.in_backward:
        raise RuntimeError(_refusal([into]))
    return into


def _zero(gradient: ShardedGradient) -> ShardedGradient:
    gradient.zero()
    return gradient


def _zero_all(gradients: Sequence[Tensor]) -> None:
    for gradient in gradients:
        gradient.zero() if isinstance(gradient, ShardedGradient) else gradient.zero_()


def _unscale_all(gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    sharded = [g for g in gradients if isinstance(g, ShardedGradient)]
    plain = [g for g in gradients if not isinstance(g, ShardedGradient)]
    if plain:
        foreach.unscale_(plain, found_inf, inv_scale)
    unscale = sharded[0].unscale()
    assert unscale is not None, "GradScaler has the optimizer"
    unscale(sharded, found_inf, inv_scale)


def _refusal(args: Sequence[Any]) -> str:
    flat = [a for one in args for a in (one if isinstance(one, (list, tuple)) else [one])]
    name = next(a.of for a in flat if isinstance(a, ShardedGradient))
    return (
        f"p.grad of parameter {name!r}: expected no access, because under ZeroOptimizer each rank "
        "has only its shard of the gradient; use opt.clip_grad_norm_(max_norm) to clip, "
        "opt.full_grad(p) to look at it, and opt.zero_grad() before converting the model"
    )


_KNOWN: dict[Any, Callable[..., Any]] = {
    _aten.add_.Tensor: _add,
    _aten.copy_.default: _copy,
    _aten.zero_.default: _zero,
    foreach.ZERO: _zero_all,
    foreach.UNSCALE: _unscale_all,
}
