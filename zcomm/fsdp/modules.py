"""What zcomm knows of torch's FSDP modules: their parameters, shards and process groups.

A module's parameters travel together. Each is cut along one dimension, mostly the first, into one
shard per rank; all shards have the size of the first, the last ones are padded with zeros:

    the input of a reduce-scatter    for each rank its shard of every parameter, one after another
    its output                       this rank's shards
    an all-gather                    the other way round

The private names of FSDP itself are in zcomm/torch_private/fsdp.py.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from zcomm.base import arguments
from zcomm.codecs import Codec, codec
from zcomm.sharding.chunks import Item
from zcomm.torch_private import fsdp
from zcomm.torch_private.ddp import uncompiled

# Zeros, in the fewest bytes: one bit each, and exact.
_PADDING = codec("sign")


class ShardedParameter(fsdp.Param):
    """A parameter, how FSDP cuts it, and its name in the model."""

    def __init__(self, param: Any, names: Mapping[nn.Module, str]) -> None:
        super().__init__(param)
        self.name = f"{names[self.module]}.{self.name_in_module}".lstrip(".")
        self.numel: int = self.shape.numel()
        self.shard_numel: int = self.shard_shape.numel()


class ShardedModule(fsdp.ParamGroup):
    """Parameters that FSDP gathers and reduces together."""

    def __init__(self, name: str, group: Any, parameters: Sequence[ShardedParameter]) -> None:
        super().__init__(group)
        self.name, self.parameters = name, parameters

    def __str__(self) -> str:
        return self.name or "the root module"

    def items(self, parameters: Sequence[ShardedParameter], codecs: Sequence[Codec]) -> list[Item]:
        """Where some of its parameters lie, one after another in each rank's part.

        Padding has items of its own, without a key, behind its parameter: what a rank owns is then
        packed as FSDP has it, and no parameter is encoded, or has a residual, together with it.
        """
        part = sum(p.shard_numel for p in parameters)
        items: list[Item] = []
        at = 0
        for p, used in zip(parameters, codecs):
            sizes = [self._owned(p, rank) for rank in range(self.world_size)]
            places = [r * part + at for r in range(self.world_size)]
            items.append(_item(p.name, used, sizes, places))
            if p.numel < p.shard_numel * self.world_size:
                ends = [place + size for place, size in zip(places, sizes)]
                items.append(_item("", _PADDING, [p.shard_numel - size for size in sizes], ends))
            at += p.shard_numel
        return items

    def _owned(self, p: ShardedParameter, rank: int) -> int:
        """How many elements of a parameter a rank owns: the last ones may have less, or none."""
        return min(max(p.numel - rank * p.shard_numel, 0), p.shard_numel)

    def numel(self, parameters: Sequence[ShardedParameter]) -> int:
        """Of all shards, padding included."""
        return self.world_size * sum(p.shard_numel for p in parameters)

    def reduced(self, numel: int, depth: int) -> list[ShardedParameter]:
        """The parameters whose gradients are in the input of a reduce-scatter.

        FSDP leaves out those that got none, and does not say which. They are in the frame of the
        function that has called the communication object, `depth` calls above.
        """
        by_id = {id(p.param): p for p in self.parameters}
        trainable = [p for p in (by_id[id(q)] for q in self.reduced_params) if p.trainable]
        if self.numel(trainable) == numel:
            return trainable
        used = [by_id[id(q)] for q in fsdp.params_of_caller(depth + 1) if id(q) in by_id]
        if self.numel(used) != numel:
            raise RuntimeError(
                f"reduce-scatter of {self}: expected gradients of {self.numel(trainable)} elements "
                f"(with padding), got {numel}, and torch does not say which parameters have one; "
                "call model.set_reduce_scatter_unused_params(True), in torch 2.13 or later"
            )
        return used

    def prescale(self, op: Any) -> float:
        """The factor for gradients before they are summed."""
        if op == torch.distributed.ReduceOp.AVG:
            return 1 / self.world_size
        if op == torch.distributed.ReduceOp.PREMUL_SUM:
            return 1 / self.divide_factor
        assert op == torch.distributed.ReduceOp.SUM
        return 1.0

    def takes_views(self, output: Tensor, op: Any, used: Sequence[ShardedParameter]) -> bool:
        """Whether FSDP does no more with the output than to make gradients of views of it.

        Everything that `foreach_reduce` does after the reduce-scatter is asked for here.
        """
        return (
            self.device.type == "cpu"  # elsewhere FSDP's streams see to it
            and not self.is_hooked
            and op != torch.distributed.ReduceOp.SUM  # else it may be divided
            and self.replica_group is None
            and all(p.takes_views(output.dtype) and not p.is_used_at_once for p in used)
        )


def _item(key: str, codec: Codec, sizes: Sequence[int], places: Sequence[int]) -> Item:
    bounds = tuple(accumulate(sizes, initial=0))
    return Item(key, codec, bounds[-1], 0, bounds, tuple(places))


# What zcomm does not send, torch does.
torch_all_gather, torch_reduce_scatter = fsdp.TorchAllGather(), fsdp.TorchReduceScatter()


def sharded_modules(model: object) -> list[ShardedModule]:
    """The FSDP modules of a model, in its own order; refuses what zcomm.fsdp cannot compress."""
    model = uncompiled(model)
    _expect_fsdp_model(model)
    assert isinstance(model, nn.Module)
    names = {module: fsdp.unwrapped_name(name) for name, module in model.named_modules()}
    found: list[ShardedModule] = []
    seen: set[int] = set()
    for module in names:
        if isinstance(module, FSDPModule):
            state = fsdp.state_of(module)()
            if id(state) not in seen:
                seen.add(id(state))
                found += _of_state(state, names)
    if not found:
        raise ValueError(
            "zcomm.fsdp.compress: expected an FSDP module with parameters, got none; call "
            "fully_shard on modules that have some"
        )
    return found


def _of_state(state: Any, names: dict[nn.Module, str]) -> list[ShardedModule]:
    """The modules of one fully_shard call: none if other calls had taken all parameters."""
    name = ", ".join(names[module] for module in fsdp.modules_of(state) if module in names)
    groups = fsdp.groups_of(state)
    if len(groups) > 1:
        raise ValueError(
            f"module {name!r}: expected one mesh for all parameters of an FSDP module, got "
            f"{len(groups)} from its shard_placement_fn; torch takes one communication object per "
            "module: wrap the parameters of each mesh in a module of their own"
        )
    made = []
    for group in groups:
        _expect_free(name, group)
        parameters = [ShardedParameter(p, names) for p in fsdp.params_of(group)]
        for p in parameters:
            if p.is_dtensor:
                raise ValueError(
                    f"parameter {p.name!r}: expected a parameter that only FSDP shards, got a "
                    "DTensor on another mesh (tensor parallelism); zcomm.fsdp does not support "
                    "such models"
                )
        made.append(ShardedModule(name, group, parameters))
    return made


def _expect_free(name: str, group: Any) -> None:
    """Refuses modules that are not sharded, and those with other communication objects."""
    if not fsdp.is_sharded(group):
        raise ValueError(
            f"module {name!r}: expected sharded parameters, got replicated ones; use "
            "DistributedDataParallel and zcomm.compress"
        )
    for comm in fsdp.collectives_of(group):
        if type(comm) not in (fsdp.TorchReduceScatter, fsdp.TorchAllGather):
            raise ValueError(
                f"module {name!r}: expected torch's own collectives, got {type(comm).__name__}; "
                "call zcomm.fsdp.compress once per model (handle.close() restores torch's), and "
                "set no other collectives"
            )


def _expect_fsdp_model(model: object) -> None:
    if isinstance(model, DistributedDataParallel):
        got, remedy = "a DistributedDataParallel", "use zcomm.compress"
    elif isinstance(model, FullyShardedDataParallel):
        got, remedy = "a FullyShardedDataParallel (FSDP1)", "use fully_shard (FSDP2)"
    elif not isinstance(model, nn.Module) or not any(
        isinstance(module, FSDPModule) for module in model.modules()
    ):
        got, remedy = arguments.describe(model), "call fully_shard on it first"
    else:
        return
    raise TypeError(f"zcomm.fsdp.compress: expected a model with fully_shard, got {got}; {remedy}")
