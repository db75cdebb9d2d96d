"""torch.distributed below its collectives: stores, backends, and process groups made by hand."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zcomm.torch_private.probe import Corner

_corner = Corner("torch._C._distributed_c10d.Backend.Options._timeout")
missing = _corner.missing

Gloo: Any = _corner.bind("torch.distributed.ProcessGroupGloo")
PrefixStore: Any = _corner.bind("torch.distributed.distributed_c10d.PrefixStore")
# The store through which ranks met.
default_store: Any = _corner.bind("torch.distributed.distributed_c10d._get_default_store")
# A group's method: also of those that torch.distributed does not know.
all_to_all: Any = _corner.reader("torch.distributed.ProcessGroup.alltoall_base")


@_corner.needs("torch.distributed.distributed_c10d._world.pg_map")
def known_groups() -> set[Any]:
    """The groups that torch has not destroyed."""
    return set(dist.distributed_c10d._world.pg_map)


@_corner.needs("torch.distributed.ProcessGroup._get_backend")
def backend_of(group: Any, device: torch.device) -> Any:
    """What sends a device's tensors in a group (None: the default one); None if nothing does."""
    whole: Any = group or dist.group.WORLD
    try:
        return whole._get_backend(device)
    except RuntimeError:
        return None


def name_of(group: Any) -> str:
    """The name of a group, which all its ranks know it by."""
    whole: Any = group or dist.group.WORLD
    name: str = whole.group_name
    return name


def timeout_of(backend: Any) -> timedelta:
    """The timeout that a backend was made with; torch's default if it does not say."""
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout or dist.default_pg_timeout


def store_address() -> str | None:
    """Where the default store listens; None if it is no TCPStore."""
    store = default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if hasattr(store, "port") else None
