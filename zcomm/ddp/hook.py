"""compress, the one line that a user adds, and its DDP comm hook: a bucket in, a future out."""

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zcomm.base import arguments
from zcomm.ddp.alone import is_world_of_one
from zcomm.ddp.compressor import DdpCompressor
from zcomm.ddp.saved_state import HookSavedState
from zcomm.engine.handle import Handle
from zcomm.sharding.hierarchy import Hierarchy
from zcomm.sharding.settings import AUTO, Codecs, Settings
from zcomm.torch_private.ddp import comm_hooks, reduced_parameters, uncompiled
from zcomm.transport.handshake import tells_others


def group_of_call(*args: Any, **kwargs: Any) -> Any:
    """The process group of the DDP model among a call's arguments; None if there is no model."""
    models = (uncompiled(value) for value in (*args, *kwargs.values()))
    return next((m.process_group for m in models if isinstance(m, DistributedDataParallel)), None)


@tells_others("compress", group_of_call)
def compress(
    ddp: nn.Module,
    codec: Codecs | Hierarchy = AUTO,
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

    All ranks call it after wrapping the model and before training. In a world of one process the
    model may be unwrapped.

    codec           "auto" (measures the links and chooses), a spec, a dict of patterns such as
                    {"*.embed*": "int8", "*": "lm4"} (the first pattern that matches a parameter's
                    name counts), or a zcomm.Hierarchy
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
    register(state, model)
    return state.handle


def register(state: "HookState", model: Any) -> None:
    """Gives a DDP model the hook; one that is not wrapped needs none."""
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(state, hook)


def model_without_hook(ddp: Any, what: str) -> Any:
    """The DDP model, without torch.compile's wrapper; refuses one that cannot take a hook.

    In a world of one process, any module.
    """
    model = uncompiled(ddp)
    if not isinstance(model, DistributedDataParallel):
        if isinstance(model, nn.Module) and is_world_of_one():
            return model
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


class HookState:
    """The state for `ddp.register_comm_hook(zcomm.HookState(codec="lm4"), zcomm.hook)`.

    At the first bucket it finds its model and compares the settings of all ranks. `state.handle` is
    what zcomm.compress returns.

    codec           "auto" (measures the links and chooses), a spec, a dict of name patterns and
                    specs, or a zcomm.Hierarchy
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

    def __init__(
        self,
        codec: Codecs | Hierarchy = AUTO,
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
    ) -> None:
        self.settings = Settings(
            codec,
            feedback=feedback,
            start_step=start_step,
            chunk_mb=chunk_mb,
            timeout_s=timeout_s,
            verify=verify,
            min_numel=min_numel,
            residual_dtype=residual_dtype,
            threads=threads,
        )
        self.scaler = _checked_scaler(scaler)
        self._compressor: DdpCompressor | None = None
        self.is_copy = False

    def __getstate__(self) -> dict[str, Any]:
        # torch copies and saves a DDP model with its hook's state, but without the hook.
        return {**self.__dict__, "_compressor": None, "is_copy": True}

    @property
    def handle(self) -> Handle:
        if self._compressor is None:
            raise RuntimeError(
                "HookState.handle: expected at least one backward() before, got none: the state "
                "learns its model at the first bucket; zcomm.compress(ddp) gives a handle at once"
            )
        return Handle(self._compressor, HookSavedState(self._compressor))

    def bind(
        self,
        ddp: nn.Module,
        compared: Mapping[str, str] | None = None,
        what: str = "compress",
        kind: str = "all_reduce",
    ) -> DdpCompressor:
        """Creates the compressor. A collective call: all ranks must have the same `compared`."""
        if self._compressor is None:
            compared = compared or {}
            self._compressor = DdpCompressor(ddp, self.settings, self.scaler, compared, what, kind)
        return self._compressor

    def compressor(self, bucket: Any) -> DdpCompressor:
        what = "the first backward with HookState"
        return self._compressor or self.bind(_model_of(self, bucket), what=what)


# No annotations: torch refuses them where they are strings.
def hook(state, bucket):  # type: ignore[no-untyped-def]
    """The comm hook: hands the bucket to the engine."""
    if not isinstance(state, HookState):
        raise TypeError(
            f"zcomm.hook: expected a zcomm.HookState, got {arguments.describe(state)}; use "
            "ddp.register_comm_hook(zcomm.HookState(codec='lm4'), zcomm.hook), or zcomm.compress"
        )
    return state.compressor(bucket).reduce(bucket)


def _model_of(state: HookState, bucket: Any) -> DistributedDataParallel:
    """The model that a state was registered with. torch does not tell, so this looks for it."""
    first = bucket.parameters()[0]
    for candidate in gc.get_objects():
        if (
            issubclass(type(candidate), DistributedDataParallel)
            and any(registered is state for _, registered in comm_hooks(candidate))
            and any(p is first for p in reduced_parameters(candidate))
        ):
            found: DistributedDataParallel = candidate
            return found
    raise RuntimeError(
        "HookState: expected to be registered with ddp.register_comm_hook(state, zcomm.hook), got "
        "a bucket of an unknown model; use zcomm.compress(ddp)"
    )


def _checked_scaler(scaler: Any) -> Any:
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise TypeError(
            f"scaler: expected a torch.amp.GradScaler or None, got {arguments.describe(scaler)}"
        )
    return scaler
