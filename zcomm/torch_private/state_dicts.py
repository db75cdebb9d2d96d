"""torch.distributed.checkpoint.state_dict: how it asks an optimizer for its state.

It calls state_dict() as anyone does, and keeps to itself whether it wants the whole state, and on
which ranks. Its own frame knows.
"""

import sys
from types import FrameType
from typing import NamedTuple

from zcomm.torch_private.probe import Corner

_MODULE = "torch.distributed.checkpoint.state_dict"
# Probed, not bound: the module takes seconds to import, and has been imported by whoever uses it.
_corner = Corner(f"{_MODULE}._get_optim_state_dict.info")
missing = _corner.missing


class Asked(NamedTuple):
    """The options that torch's get_optimizer_state_dict and its siblings were given."""

    full: bool  # whole tensors; else this rank's shards
    on_rank_0: bool  # only there
    from_rank_0: bool  # who sends it to the others, when a state is loaded


def asked() -> Asked | None:
    """The options of torch's function, if one is the caller; None if it is someone else."""
    frame: FrameType | None = sys._getframe(1)
    is_torch = False
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE:
            is_torch, info = True, frame.f_locals.get("info")
            if info is not None:
                on_rank_0 = info.full_state_dict and info.cpu_offload
                return Asked(info.full_state_dict, on_rank_0, info.broadcast_from_rank0)
        frame = frame.f_back
    if is_torch:
        raise RuntimeError(missing())
    return None
