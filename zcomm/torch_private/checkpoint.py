"""torch.distributed.checkpoint: which process groups it can work with."""

import importlib

from zcomm.torch_private.probe import Corner

_corner = Corner()
missing = _corner.missing


def takes_any_group() -> bool:
    """Whether it works in a group without rank 0: since torch 2.8 its coordinator is the group's.

    Before, it is rank 0 of all ranks, also where that one is not there.
    """
    wrapper = importlib.import_module("torch.distributed.checkpoint.utils")._DistWrapper
    return "global_coordinator_rank" in wrapper.broadcast_object.__code__.co_names
