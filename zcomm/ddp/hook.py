"""The DDP comm hook: a bucket in, a future out."""

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from zcomm.base import arguments
from zcomm.ddp.compressor import DdpCompressor
from zcomm.ddp.state import HookSavedState
from zcomm.engine.handle import Handle
from zcomm.sharding.hierarchy import Hierarchy
from zcomm.sharding.settings import Codecs, Settings
from zcomm.torch_private.ddp import comm_hooks, reduced_parameters


class HookState:
    """The state for `ddp.register_comm_hook(zcomm.HookState(codec="lm4"), zcomm.hook)`.

    It finds its model at the first bucket and compares the settings of all ranks then.
    `state.handle` is what zcomm.compress returns.

    codec           a spec, a dict of name patterns and specs, or a zcomm.Hierarchy
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
        # DDP is copied and saved with its hook's state, but the copy has no hook.
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
        self, ddp: DistributedDataParallel, compared: Mapping[str, str] | None = None
    ) -> DdpCompressor:
        """Meets the other ranks: a collective call. `compared` must be the same on all of them."""
        if self._compressor is None:
            self._compressor = DdpCompressor(ddp, self.settings, self.scaler, compared)
        return self._compressor

    def compressor(self, bucket: Any) -> DdpCompressor:
        return self._compressor or self.bind(_model_of(self, bucket))


# Without annotations: torch refuses them where they are strings.
def hook(state, bucket):  # type: ignore[no-untyped-def]
    """The comm hook: hands the bucket to the engine."""
    return state.compressor(bucket).reduce(bucket)


def _model_of(state: HookState, bucket: Any) -> DistributedDataParallel:
    """The model that a state was registered with. torch does not say, but the model knows."""
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
