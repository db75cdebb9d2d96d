"""compress: the one line that a user adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from zcomm import arguments
from zcomm.codecs import Codec
from zcomm.hook import Handle, HookState, hook


def compress(
    ddp: DistributedDataParallel,
    codec: str | Codec | Mapping[str, str | Codec] = "lm4",
    *,
    scaler: Any = None,
    **settings: Any,
) -> Handle:
    """Compresses the gradients of a DDP model from its next backward() on.

    All ranks call it, after wrapping the model and before training. `codec` is a spec, or a dict
    of patterns of parameter names: {"*.embed*": "int8", "*": "lm4"}. `scaler` is the GradScaler,
    if one is used. Other settings: see zcomm.Settings.
    """
    model = _model(ddp)
    # A copy of a model with a hook has none, but still the list.
    model._comm_hooks[:] = [(h, s) for h, s in model._comm_hooks if not getattr(s, "is_copy", 0)]
    if model._comm_hooks:
        names = ", ".join(getattr(h, "__qualname__", repr(h)) for h, _ in model._comm_hooks)
        raise ValueError(
            f"compress: expected a model without a comm hook, got one with {names}; torch allows "
            "one hook per DistributedDataParallel and cannot remove it: wrap the module anew"
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError(
            "compress: expected DistributedDataParallel without mixed_precision=, got one with it: "
            "it takes the only place for a comm hook; use torch.autocast instead"
        )
    state = HookState(codec, scaler=scaler, **settings)
    compressor = state.bind(model)
    model.register_comm_hook(state, hook)
    return Handle(compressor)


def _model(ddp: Any) -> Any:
    """The DDP model, also inside torch.compile's wrapper."""
    model = getattr(ddp, "_orig_mod", ddp)
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            "compress: expected a DistributedDataParallel, got "
            f"{arguments.describe(model)}; wrap the model first"
        )
    return model
