"""What zcomm knows of torch's FSDP modules: their parameters, shards and process groups.

A module's parameters travel together. Each is cut along one dimension, mostly the first, into one
shard per rank; all shards have the size of the first, the last ones are padded with zeros:

    the input of a reduce-scatter    for each rank its shard of every parameter, one after another
    its output                       this rank's shards
    an all-gather                    the other way round

What is private in torch is used here and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.nn.parallel import DistributedDataParallel

from zcomm.base import arguments
from zcomm.codecs import Codec, codec
from zcomm.sharding.chunks import Item

# What wrappers add to the names of modules.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")

# Zeros, in the fewest bytes: one bit each, and exact.
_PADDING = codec("sign")


class ShardedParameter:
    """A parameter, and how FSDP cuts it."""

    def __init__(self, name: str, param: Any) -> None:
        self.name, self.param = name, param
        self.shape: torch.Size = param._orig_size
        self.numel: int = self.shape.numel()
        self.shard_shape: torch.Size = param.padded_sharded_param_size
        self.shard_numel: int = self.shard_shape.numel()
        self.dim: int = param.fsdp_placement.dim

    @property
    def trainable(self) -> bool:
        return bool(self.param.sharded_param.requires_grad)

    @property
    def is_used_at_once(self) -> bool:
        """Whether FSDP, or a hook, reads its new gradient as soon as that is there."""
        p = self.param.sharded_param
        hooked = bool(getattr(p, "_post_accumulate_grad_hooks", None))
        return p.grad is not None or hooked or self.param.offload_to_cpu

    @property
    def has_extension(self) -> bool:
        """Whether it decides itself what is gathered of it."""
        return hasattr(self.param._sharded_local_tensor, "fsdp_pre_all_gather")


class ShardedModule:
    """Parameters that FSDP gathers and reduces together."""

    def __init__(self, name: str, group: Any, parameters: Sequence[ShardedParameter]) -> None:
        self.name, self.group, self.parameters = name, group, parameters
        mesh = group.mesh_info
        self.process_group = mesh.shard_process_group
        self.rank: int = mesh.shard_mesh_rank
        self.world_size: int = mesh.shard_mesh_size
        self.device: torch.device = group.device
        self.replica, self.replicas, self.replica_group = 0, 1, None
        if isinstance(mesh, HSDPMeshInfo):
            self.replica, self.replicas = mesh.replicate_mesh_rank, mesh.replicate_mesh_size
            self.replica_group = mesh.replicate_process_group

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
        trainable = [p for p in self.parameters if p.trainable]
        if self.numel(trainable) == numel:
            return trainable
        given = {id(p) for p in sys._getframe(depth + 1).f_locals.get("fsdp_params", ())}
        used = [p for p in self.parameters if id(p.param) in given]
        if self.numel(used) != numel:
            raise RuntimeError(
                f"reduce-scatter of {self}: expected gradients of {self.numel(trainable)} elements "
                f"(with padding), got {numel} and no way to tell which parameters have one; call "
                "model.set_reduce_scatter_unused_params(True)"
            )
        return used

    def prescale(self, op: Any) -> float:
        """What gradients are multiplied with before they are summed."""
        if op == torch.distributed.ReduceOp.AVG:
            return 1 / self.world_size
        if op == torch.distributed.ReduceOp.PREMUL_SUM:
            return 1 / float(self.group.gradient_divide_factor)
        assert op == torch.distributed.ReduceOp.SUM
        return 1.0

    def takes_views(self, output: Tensor, op: Any, used: Sequence[ShardedParameter]) -> bool:
        """Whether FSDP does no more with the output than to make gradients of views of it.

        Everything that `foreach_reduce` does after the reduce-scatter is asked for here.
        """
        group = self.group
        return (
            self.device.type == "cpu"  # elsewhere FSDP's streams see to it
            and output.dtype is group._orig_dtype  # else it is cast
            and op != torch.distributed.ReduceOp.SUM  # else it may be divided
            and self.replica_group is None
            and group._all_reduce_hook is None
            and not any(p.is_used_at_once for p in used)
        )

    @property
    def input_buffers(self) -> int:
        """How many inputs of reduce-scatters may be under way while the next one is made."""
        return int(self.group.comm_ctx.reduce_scatter_max_input_buffers)

    def residual_unit(self) -> float:
        """What a residual of 1 comes to in the gradient that the optimizer sees.

        It depends on the ranks and replicas, unless FSDP takes the mean before the sum.
        """
        group = self.group
        _, post, _, all_reduce = collectives._get_gradient_divide_factors(
            self.process_group,
            self.replica_group,
            group.mp_policy.reduce_dtype or group.mp_policy.param_dtype or self._dtype(),
            self.device.type,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
        )
        averaged = all_reduce == torch.distributed.ReduceOp.AVG
        return 1 / (post or 1.0) / (self.replicas if averaged else 1)

    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.parameters[0].param.sharded_param.dtype
        return dtype

    def set_collectives(self, reduce_scatter: Any, all_gather: Any) -> None:
        for module in self.group.modules:
            module.set_custom_reduce_scatter(reduce_scatter)
            module.set_custom_all_gather(all_gather)

    def reset_collectives(self) -> None:
        """Gives it torch's own back."""
        self.set_collectives(collectives.DefaultReduceScatter(), collectives.DefaultAllGather())


def _item(key: str, codec: Codec, sizes: Sequence[int], places: Sequence[int]) -> Item:
    bounds = tuple(accumulate(sizes, initial=0))
    return Item(key, codec, bounds[-1], 0, bounds, tuple(places))


# Where zcomm cannot send a gather, torch does.
torch_all_gather = collectives.DefaultAllGather()


def sharded_modules(model: object) -> list[ShardedModule]:
    """The FSDP modules of a model, in its own order; refuses what zcomm.fsdp cannot compress."""
    model = getattr(model, "_orig_mod", model)
    _expect_fsdp_model(model)
    assert isinstance(model, nn.Module)
    names = {module: _plain_name(name) for name, module in model.named_modules()}
    found: list[ShardedModule] = []
    seen: set[int] = set()
    for module in names:
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
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
    """What a call of fully_shard made: nothing, where others had all parameters."""
    name = ", ".join(names[module] for module in state._modules if module in names)
    if len(state._fsdp_param_groups) > 1:
        raise ValueError(
            f"module {name!r}: expected one mesh for all parameters of an FSDP module, got "
            f"{len(state._fsdp_param_groups)} from its shard_placement_fn; torch has one place for "
            "a communication object: wrap the parameters of each mesh in a module of their own"
        )
    made = []
    for group in state._fsdp_param_groups:
        _expect_free(name, group)
        parameters = [
            ShardedParameter(_parameter_name(p, names), p)
            for p in group.fsdp_params
            if _expect_plain(_parameter_name(p, names), p)
        ]
        made.append(ShardedModule(name, group, parameters))
    return made


def _parameter_name(param: Any, names: dict[nn.Module, str]) -> str:
    info = param._module_info
    return f"{names[info.module]}.{info.param_name}".lstrip(".")


def _plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = f"{name}.".replace(wrapper, "")[:-1]
    return name


def _expect_plain(name: str, param: Any) -> bool:
    """Refuses a parameter that something else than FSDP has cut as well."""
    if param.is_dtensor:
        raise ValueError(
            f"parameter {name!r}: expected a parameter that only FSDP shards, got a DTensor of "
            "another mesh as well (tensor parallelism); zcomm.fsdp does not compress such models"
        )
    return True


def _expect_free(name: str, group: Any) -> None:
    """Refuses modules that are not sharded, and those with other communication objects."""
    if not isinstance(group.mesh_info, FSDPMeshInfo):
        raise ValueError(
            f"module {name!r}: expected parameters that are sharded, got replicated ones; use "
            "DistributedDataParallel and zcomm.compress"
        )
    for comm in (group._reduce_scatter_comm, group._all_gather_comm):
        if type(comm) not in (collectives.DefaultReduceScatter, collectives.DefaultAllGather):
            raise ValueError(
                f"module {name!r}: expected torch's own collectives, got {type(comm).__name__}; "
                "call zcomm.fsdp.compress once for a model (handle.close() gives torch's back), "
                "and set no others"
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
