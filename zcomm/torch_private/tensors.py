"""What tensors are made of: subclasses without memory, versions, storages, and dispatch modes."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, UntypedStorage

from zcomm.torch_private.probe import Corner

_corner = Corner()
missing = _corner.missing

# The __torch_function__ of a subclass that has only a __torch_dispatch__.
no_torch_function: Any = _corner.bind("torch._C._disabled_torch_function_impl")
# Makes a tensor of a subclass: a size and a dtype, and no memory.
without_memory: Callable[..., Any] = _corner.bind("torch.Tensor._make_wrapper_subclass")
# Sees every operation on tensors, inside `with`.
DispatchMode: Any = _corner.bind("torch.utils._python_dispatch.TorchDispatchMode")
tree_leaves: Callable[[Any], list[Any]] = _corner.bind("torch.utils._pytree.tree_leaves")
# Goes up with every write that autograd knows of.
version: Callable[[Tensor], int] = _corner.reader("torch.Tensor._version")
# The same for all tensors that share memory.
storage_key: Callable[[UntypedStorage], int] = _corner.reader("torch.UntypedStorage._cdata")
