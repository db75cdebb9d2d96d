"""compress and ZeroOptimizer: the one line that a user adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from zcomm.base import arguments
from zcomm.codecs import Codec
from zcomm.ddp.hook import HookState, hook
from zcomm.ddp.parameters import trainable
from zcomm.engine.handle import Handle
from zcomm.sharding.hierarchy import Hierarchy
from zcomm.sharding.settings import SETTING_NAMES, Settings
from zcomm.torch_private.ddp import comm_hooks, uncompiled
from zcomm.zero.optimizer import ShardedOptimizer

Codecs = str | Codec | Mapping[str, str | Codec] | Hierarchy


def compress(
    ddp: DistributedDataParallel,
    codec: Codecs = "lm4",
    *,
    scaler: Any = None,
    **settings: Any,
) -> Handle:
    """Compresses the gradients of a DDP model from its next backward() on.

    All ranks call it, after wrapping the model and before training. `codec` is a spec, or a dict
    of patterns of parameter names: {"*.embed*": "int8", "*": "lm4"}. `scaler` is the GradScaler,
    if one is used. Other settings: see zcomm.Settings.
    """
    model = _model_without_hook(ddp, "compress")
    state = HookState(codec, scaler=scaler, **settings)
    state.bind(model)
    model.register_comm_hook(state, hook)
    return state.handle


class ZeroOptimizer(ShardedOptimizer):
    """A torch.optim.Optimizer over a DDP model whose state is sharded over the ranks (ZeRO-1).

    All ranks make it, after wrapping the model, in place of `optimizer_class(params, ...)`. It
    compresses gradients with `codec` and takes the settings of zcomm.compress as well; what is no
    setting goes to `optimizer_class`. Parameters are gathered exactly, or with `param_codec`.

    `opt.inner` is the torch optimizer of this rank's shards, `opt.handle` what zcomm.compress
    returns. `params` are as for any optimizer: None (all trainable), an iterable, or groups.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer_class: Any,
        params: Any = None,
        codec: Codecs = "lm4",
        param_codec: Codecs | None = None,
        *,
        lr: Any = 3e-4,
        scaler: Any = None,
        **arguments: Any,
    ) -> None:
        model = _model_without_hook(ddp, "ZeroOptimizer")
        settings = {name: arguments.pop(name) for name in SETTING_NAMES if name in arguments}
        state = HookState(codec, scaler=scaler, **settings)
        param_settings = None
        if param_codec is not None:
            if isinstance(param_codec, Hierarchy):
                raise TypeError(
                    "ZeroOptimizer: expected param_codec as a codec or patterns, got a Hierarchy: "
                    "give that as codec=; parameters then take the same way"
                )
            param_settings = Settings(param_codec, min_numel=state.settings.min_numel)
        named = trainable(model)
        given = list(named.values()) if params is None else params
        super().__init__(optimizer_class, given, param_settings, {"lr": lr, **arguments})
        compressor = state.bind(model, self.compared({id(p): name for name, p in named.items()}))
        self.attach(compressor, model)
        model.register_comm_hook(state, hook)
        self.handle = state.handle


def _model_without_hook(ddp: Any, what: str) -> Any:
    """The DDP model, also inside torch.compile's wrapper; refuses one that cannot have a hook."""
    model = uncompiled(ddp)
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"{what}: expected a DistributedDataParallel, got "
            f"{arguments.describe(model)}; wrap the model first"
        )
    # A copy of a model with a hook has none, but still the list.
    hooks = comm_hooks(model)
    hooks[:] = [(h, s) for h, s in hooks if not getattr(s, "is_copy", 0)]
    if hooks:
        names = ", ".join(getattr(h, "__qualname__", repr(h)) for h, _ in hooks)
        raise ValueError(
            f"{what}: expected a model without a comm hook, got one with {names}; torch allows "
            "one hook per DistributedDataParallel and cannot remove it: wrap the module anew"
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError(
            f"{what}: expected DistributedDataParallel without mixed_precision=, got one with it: "
            "it takes the only place for a comm hook; use torch.autocast instead"
        )
    return model
