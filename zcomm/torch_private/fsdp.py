"""FSDP2 (fully_shard): its parameters, groups of parameters, meshes and communication objects.

Each call of fully_shard makes a state with a group of parameters for each mesh. A group gathers and
reduces its parameters together, through two communication objects that can be replaced.
"""

import sys
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn

from zcomm.torch_private.ddp import uncompiled_name
from zcomm.torch_private.probe import Corner

_FSDP = "torch.distributed.fsdp._fully_shard"
_STATE = f"{_FSDP}._fsdp_state.FSDPState"
_PARAM = f"{_FSDP}._fsdp_param.FSDPParam"
_GROUP = f"{_FSDP}._fsdp_param_group.FSDPParamGroup"
_MESH = f"{_FSDP}._fsdp_common.HSDPMeshInfo"
_CHECKPOINTED = "_checkpoint_wrapped_module"
_corner = Corner(
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE",
    user="zcomm.fsdp",
    oldest="2.9",  # the first whose communication objects can be replaced
)
missing = _corner.missing

# The bases of communication objects, and those that FSDP has without zcomm.
AllGather: Any = _corner.bind(f"{_FSDP}._fsdp_api.AllGather")
ReduceScatter: Any = _corner.bind(f"{_FSDP}._fsdp_api.ReduceScatter")
TorchAllGather: Any = _corner.bind(f"{_FSDP}._fsdp_collectives.DefaultAllGather")
TorchReduceScatter: Any = _corner.bind(f"{_FSDP}._fsdp_collectives.DefaultReduceScatter")

_ShardedMesh: Any = _corner.bind(f"{_FSDP}._fsdp_common.FSDPMeshInfo")
_ReplicatedMesh: Any = _corner.bind(_MESH)
_divide_factors: Any = _corner.bind(f"{_FSDP}._fsdp_collectives._get_gradient_divide_factors")

# A method: what fully_shard made for a module; the modules of one call share it.
state_of: Any = _corner.reader(f"{_FSDP}._fully_shard.FSDPModule._get_fsdp_state")
modules_of: Callable[[Any], Sequence[nn.Module]] = _corner.reader(f"{_STATE}._modules")
params_of: Callable[[Any], Sequence[Any]] = _corner.reader(f"{_GROUP}.fsdp_params")


def _all(owner: str, names: str) -> list[str]:
    return [f"{owner}.{name}" for name in names.split()]


@_corner.needs(
    "torch.Tensor._post_accumulate_grad_hooks",
    *_all(_PARAM, "_orig_size padded_sharded_param_size fsdp_placement is_dtensor _module_info"),
    *_all(_PARAM, "sharded_param offload_to_cpu _sharded_local_tensor mp_policy"),
    f"{_PARAM}.sharded_grad_dtype|orig_dtype",
)
class Param:
    """A parameter, and how FSDP cuts it."""

    def __init__(self, param: Any) -> None:
        self.param = param
        self.shape: torch.Size = param._orig_size
        self.shard_shape: torch.Size = param.padded_sharded_param_size
        self.dim: int = param.fsdp_placement.dim
        self.is_dtensor: bool = param.is_dtensor
        self.module: nn.Module = param._module_info.module
        self.name_in_module: str = param._module_info.param_name

    @property
    def trainable(self) -> bool:
        return bool(self.param.sharded_param.requires_grad)

    @property
    def is_used_at_once(self) -> bool:
        """Whether FSDP, or a hook, reads its new gradient as soon as there is one."""
        p = self.param.sharded_param
        hooked = bool(getattr(p, "_post_accumulate_grad_hooks", None))
        return p.grad is not None or hooked or self.param.offload_to_cpu

    def takes_views(self, dtype: torch.dtype) -> bool:
        """Whether its gradient is a view of an output of this dtype: FSDP does not cast it."""
        if hasattr(self.param, "sharded_grad_dtype"):  # each parameter has its own; None is any
            return self.param.sharded_grad_dtype in (None, dtype)
        return bool(self.param.orig_dtype is dtype)

    def reduce_dtype(self) -> torch.dtype:
        """What its gradient is reduced in; those of a group that differ are promoted."""
        p, policy = self.param, self.param.mp_policy
        computed: torch.dtype = policy.param_dtype or p.sharded_param.dtype
        return policy.reduce_dtype or getattr(p, "sharded_grad_dtype", None) or computed

    @property
    def has_extension(self) -> bool:
        """Whether it decides itself what is gathered of it."""
        return hasattr(self.param._sharded_local_tensor, "fsdp_pre_all_gather")


@_corner.needs(
    *_all(_GROUP, "mesh_info device modules comm_ctx _all_reduce_hook fsdp_params"),
    *_all(_GROUP, "gradient_divide_factor force_sum_reduction_for_comms"),
    *_all(_MESH, "shard_process_group shard_mesh_rank shard_mesh_size"),
    *_all(_MESH, "replicate_process_group replicate_mesh_rank replicate_mesh_size"),
)
class ParamGroup:
    """Parameters that FSDP gathers and reduces together: over which ranks, and how."""

    def __init__(self, group: Any) -> None:
        self.group, mesh = group, group.mesh_info
        self.process_group = mesh.shard_process_group
        self.rank: int = mesh.shard_mesh_rank
        self.world_size: int = mesh.shard_mesh_size
        self.device: torch.device = group.device
        self.replica, self.replicas, self.replica_group = 0, 1, None
        if isinstance(mesh, _ReplicatedMesh):
            self.replica, self.replicas = mesh.replicate_mesh_rank, mesh.replicate_mesh_size
            self.replica_group = mesh.replicate_process_group

    @property
    def divide_factor(self) -> float:
        return float(self.group.gradient_divide_factor)

    @property
    def is_hooked(self) -> bool:
        """Whether a hook gets the output of a reduce-scatter before there are gradients."""
        return self.group._all_reduce_hook is not None

    @property
    def reduced_params(self) -> Sequence[Any]:
        """Its parameters as they lie in a reduce-scatter: since torch 2.15 those whose gradients
        have one dtype lie together."""
        params: Sequence[Any] = self.group.fsdp_params
        order = getattr(self.group, "_reduce_scatter_param_indices", range(len(params)))
        return [params[i] for i in order]

    @property
    def input_buffers(self) -> int:
        """How many inputs of reduce-scatters may be under way while the next one is made.

        Before torch 2.13, which lets users choose, FSDP waits for each one before the next.
        """
        return int(getattr(self.group.comm_ctx, "reduce_scatter_max_input_buffers", 1))

    def residual_unit(self) -> float:
        """What a residual of 1 comes to in the gradient that the optimizer sees.

        It depends on the ranks and replicas, unless FSDP takes the mean before the sum.
        """
        group = self.group
        dtypes = (
            Param(p).reduce_dtype() for p in group.fsdp_params if p.sharded_param.requires_grad
        )
        _, post, _, all_reduce = _divide_factors(
            self.process_group,
            self.replica_group,
            reduce(torch.promote_types, dtypes),
            self.device.type,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
        )
        averaged = all_reduce == torch.distributed.ReduceOp.AVG
        return 1 / (post or 1.0) / (self.replicas if averaged else 1)

    def set_collectives(self, reduce_scatter: Any, all_gather: Any) -> None:
        for module in self.group.modules:
            module.set_custom_reduce_scatter(reduce_scatter)
            module.set_custom_all_gather(all_gather)

    def reset_collectives(self) -> None:
        """Gives it torch's own back."""
        self.set_collectives(TorchReduceScatter(), TorchAllGather())


@_corner.needs(f"{_STATE}._fsdp_param_groups|_fsdp_param_group")
def groups_of(state: Any) -> Sequence[Any]:
    """One for each mesh. Before torch 2.12 a state has one group, or None."""
    if not hasattr(state, "_fsdp_param_groups"):
        return [state._fsdp_param_group] if state._fsdp_param_group else []
    groups: Sequence[Any] = state._fsdp_param_groups
    return groups


def is_sharded(group: Any) -> bool:
    """Not if its parameters are replicated."""
    return isinstance(group.mesh_info, _ShardedMesh)


@_corner.needs(*_all(_GROUP, "_reduce_scatter_comm _all_gather_comm"))
def collectives_of(group: Any) -> tuple[Any, Any]:
    """The communication objects of a group."""
    return group._reduce_scatter_comm, group._all_gather_comm


@_corner.needs(f"{_FSDP}._fsdp_collectives.foreach_reduce.fsdp_params")
def params_of_caller(depth: int) -> Sequence[Any]:
    """The parameters that foreach_reduce, `depth` calls above, reduces.

    They are in a local variable: it does not tell the communication object.
    """
    params: Sequence[Any] = sys._getframe(depth + 1).f_locals.get("fsdp_params", ())
    return params


def unwrapped_name(name: str) -> str:
    """The name of a module as it was before torch.compile and activation checkpointing."""
    return uncompiled_name(f"{name}.").replace(f"{_CHECKPOINTED}.", "")[:-1]
