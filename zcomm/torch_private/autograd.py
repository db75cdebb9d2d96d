"""backward(), as autograd runs it: which one is under way, and a call at its end.

torch numbers each backward(), and calls what was queued during it when all its gradients are done.
A callback may queue more.
"""

from collections.abc import Callable

import torch

from zcomm.torch_private.probe import Corner

_corner = Corner()
missing = _corner.missing

# The number of the backward() that runs on this thread; -1 if none does.
graph_task_id: Callable[[], int] = _corner.bind("torch._C._current_graph_task_id")


@_corner.needs("torch.autograd.Variable._execution_engine.queue_callback")
def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Has autograd call it when backward() is done; False if no backward() is under way."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True
