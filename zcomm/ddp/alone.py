"""A world of one process, where the model may be unwrapped.

Ray's and Accelerate's `prepare` leave it as it is there. Gradients are whole already: nothing is
sent, and no hook is needed.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from zcomm.ddp.observers import WeakHook
from zcomm.torch_private.autograd import at_end_of_backward, graph_task_id
from zcomm.transport.handshake import Caller

# The number of processes, as torchrun, Open MPI, MPICH and srun tell each of them.
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def is_world_of_one() -> bool:
    """Whether this is the only process; without a process group, as the launcher says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() == 1
    return all(os.environ.get(name, "1") == "1" for name in _WORLD_SIZES)


class LoneCaller(Caller):
    """A call of all ranks, of which there is one. Needs no process group."""

    def gather(self, mine: bytes) -> list[bytes]:
        return [mine]


class BackwardWatch:
    """Calls `ended` at the end of each backward() that gives one of the parameters a gradient."""

    def __init__(self, parameters: Iterable[Any], ended: Callable[[], None]) -> None:
        self._ended, self._last = ended, -1
        for p in parameters:
            p.register_post_accumulate_grad_hook(WeakHook(self._note))

    def _note(self) -> None:
        if graph_task_id() != self._last and at_end_of_backward(self._ended):
            self._last = graph_task_id()
