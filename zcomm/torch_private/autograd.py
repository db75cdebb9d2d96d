"""Autograd: which backward() is running, a call at its end, ranges for its profiler, and code that
torch.compile leaves alone.

torch numbers each backward(), and runs the callbacks queued during it once all gradients are done.
A callback may queue more.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from zcomm.torch_private.probe import Corner

_F = TypeVar("_F", bound=Callable[..., Any])
_corner = Corner()
missing = _corner.missing

# The number of the backward() that runs on this thread; -1 if none does.
graph_task_id: Callable[[], int] = _corner.bind("torch._C._current_graph_task_id")
# A range of torch.profiler. It takes 1 us; torch's public record_function always takes 20.
_Ranges = Callable[[str], AbstractContextManager[None]]
Range: _Ranges = _corner.bind("torch._C._profiler._RecordFunctionFast")
# Has torch.compile run a function as it is. The public torch.compiler.disable imports the compiler.
eager: Callable[[_F], _F] = _corner.bind("torch._disable_dynamo")


@_corner.needs("torch.autograd.Variable._execution_engine.queue_callback")
def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Has autograd call it when backward() is done; False if no backward() is under way."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True
