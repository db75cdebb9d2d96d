"""DistributedDataParallel and what wraps it: hooks, parameters, buckets, Join, torch.compile."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from zcomm.torch_private.probe import Corner

_DDP = "torch.nn.parallel.DistributedDataParallel"
_IGNORE = "_set_params_and_buffers_to_ignore_for_model"
_COMPILED = "_orig_mod"
_corner = Corner(f"{_DDP}.{_IGNORE}", f"torch._dynamo.eval_frame.OptimizedModule.{_COMPILED}")
missing = _corner.missing

# What a user calls, before wrapping a module, for parameters that DDP should leave alone.
IGNORE_CALL = f"DistributedDataParallel.{_IGNORE}(module, [name])"

# The size of DDP's first bucket, unless bucket_cap_mb is given.
FIRST_BUCKET_BYTES: int = _corner.bind("torch.distributed._DEFAULT_FIRST_BUCKET_BYTES")
# Takes tensors and the buckets' size limits; returns the indices of tensors, by bucket, and sizes.
assign_buckets: Any = _corner.bind("torch.distributed._compute_bucket_assignment_by_size")
ignored_names: Callable[[Any], Collection[str]] = _corner.reader(f"{_DDP}.parameters_to_ignore")
# Also those that the module does not name any more.
reduced_parameters: Callable[[Any], Sequence[Tensor]] = _corner.reader(f"{_DDP}._module_parameters")


@_corner.needs(f"{_DDP}._comm_hooks")
def comm_hooks(ddp: Any) -> list[Any]:
    """The registered hooks, each with its state: the list itself."""
    hooks: list[Any] = vars(ddp).get("_comm_hooks", [])
    return hooks


@_corner.needs(f"{_DDP}._join_config")
def is_joining(ddp: Any) -> bool:
    """Whether torch's Join runs it: ranks may run out of data."""
    return bool(ddp._join_config.enable)


@_corner.needs(f"{_DDP}._divide_by_initial_world_size")
def divides_by_all_ranks(ddp: Any) -> bool:
    """Whether means are over all ranks, even those that have run out of data."""
    return getattr(ddp, "_divide_by_initial_world_size", True) is not False


def uncompiled(model: Any) -> Any:
    """The model inside torch.compile's wrapper; any other as it is."""
    return getattr(model, _COMPILED, model)


def uncompiled_name(name: str) -> str:
    """The name of a parameter as it was before torch.compile."""
    return name.replace(f"{_COMPILED}.", "")
