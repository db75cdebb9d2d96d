"""compress: the one line that a user adds."""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from zcomm.base import arguments
from zcomm.ddp.hook import HookState, hook
from zcomm.engine.handle import Handle
from zcomm.sharding.hierarchy import Hierarchy
from zcomm.sharding.settings import Codecs
from zcomm.torch_private.ddp import comm_hooks, uncompiled


def compress(
    ddp: DistributedDataParallel,
    codec: Codecs | Hierarchy = "lm4",
    *,
    scaler: Any = None,
    feedback: bool | float | None = None,
    start_step: int = 0,
    chunk_mb: float | None = None,
    timeout_s: float | None = None,
    verify: bool = True,
    min_numel: int = 1024,
    residual_dtype: torch.dtype | str = torch.float32,
    threads: int | None = None,
) -> Handle:
    """Compresses the gradients of a DDP model, starting with its next backward().

    All ranks call it after wrapping the model and before training.

    codec           a spec, a dict of patterns such as {"*.embed*": "int8", "*": "lm4"} (the first
                    pattern that matches a parameter's name counts), or a zcomm.Hierarchy
    scaler          the GradScaler, if the loop uses one
    feedback        error feedback: None (the codec's best), True, False, or a decay from 0 to 1
    start_step      earlier steps are uncompressed
    chunk_mb        fp32 megabytes encoded and sent at a time; None: the best for the group
    timeout_s       seconds to wait for other ranks; None: the group's timeout
    verify          whether frames carry checksums
    min_numel       smaller parameters are sent uncompressed
    residual_dtype  how residuals are stored: fp32, bf16 or int8
    threads         threads for the codecs; None: torch's number
    """
    model = model_without_hook(ddp, "compress")
    state = HookState(
        codec,
        scaler=scaler,
        feedback=feedback,
        start_step=start_step,
        chunk_mb=chunk_mb,
        timeout_s=timeout_s,
        verify=verify,
        min_numel=min_numel,
        residual_dtype=residual_dtype,
        threads=threads,
    )
    state.bind(model)
    model.register_comm_hook(state, hook)
    return state.handle


def model_without_hook(ddp: Any, what: str) -> Any:
    """The DDP model, unwrapped from torch.compile; refuses one that cannot take a hook."""
    model = uncompiled(ddp)
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"{what}: expected a DistributedDataParallel, got "
            f"{arguments.describe(model)}; wrap the model first"
        )
    # A copied model has no hook, but torch copies its list of hooks.
    hooks = comm_hooks(model)
    hooks[:] = [(h, s) for h, s in hooks if not getattr(s, "is_copy", 0)]
    if hooks:
        names = ", ".join(getattr(h, "__qualname__", repr(h)) for h, _ in hooks)
        raise ValueError(
            f"{what}: expected a model without a comm hook, got one with {names}; torch allows "
            "one hook per DistributedDataParallel and cannot remove it: wrap the module again"
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError(
            f"{what}: expected DistributedDataParallel without mixed_precision=, got one with it: "
            "mixed_precision= needs the only comm hook; use torch.autocast instead"
        )
    return model
