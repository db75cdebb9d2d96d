"""Registration: what the callbacks of all frameworks share."""

import weakref
from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from zcomm.ddp.hook import HookState, compress
from zcomm.engine.handle import Handle
from zcomm.sharding.hierarchy import Hierarchy
from zcomm.sharding.settings import AUTO, Codecs
from zcomm.torch_private.ddp import uncompiled


class Registration:
    """Compresses the gradients of the model that a framework wraps when training starts.

    Takes the settings of zcomm.compress and checks them at once. Finds the framework's `scaler`,
    if there is one. With `resume=False` training ignores the residuals in a checkpoint.
    """

    def __init__(
        self,
        codec: Codecs | Hierarchy = AUTO,
        *,
        scaler: Any = None,
        resume: bool = True,
        **settings: Any,
    ) -> None:
        HookState(codec, scaler=scaler, **settings)  # refuses what is wrong
        self._arguments = {"codec": codec, **settings}
        self._scaler, self.resume = scaler, resume
        self._handle: Handle | None = None
        self._model: weakref.ref[Any] | None = None

    @property
    def handle(self) -> Handle:
        """What zcomm.compress returned for the last training that was started."""
        if self._handle is None:
            raise RuntimeError(
                "Compress.handle: expected a training that has started, got none: the framework "
                "wraps the model when training starts; read it during or after training"
            )
        return self._handle

    def register(self, model: Any, scaler: Any) -> None:
        """Compresses `model`, unless the previous training did."""
        if self._model is not None and self._model() is model:
            return
        self.close()
        scaler = self._scaler if self._scaler is not None else scaler
        self._handle = compress(model, scaler=scaler, **self._arguments)
        self._model = weakref.ref(model)

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Resumes from a handle's state. Without residuals it fits any codec and world size."""
        if saved is None or not self.resume:
            return
        if not any(saved["residuals"].values()):
            mine = self.handle.state_dict()
            kept = {key: saved[key] for key in ("step", "scale", "choice") if key in saved}
            saved = {**mine, **kept}
        try:
            self.handle.load_state_dict(saved)
        except ValueError as error:
            raise ValueError(
                f"Compress: expected a checkpoint whose residuals fit, got this: {error}; to start "
                "without them, use Compress(..., resume=False)"
            ) from error

    def close(self) -> None:
        """Stops the engine of the last training; the handle keeps its statistics."""
        self._model = None
        if self._handle is not None:
            self._handle.close()


def expect_ddp(model: Any, what: str, remedy: str) -> None:
    """Refuses a model that the framework did not wrap in DistributedDataParallel."""
    if not isinstance(uncompiled(model), DistributedDataParallel):
        raise ValueError(
            f"Compress: expected a model wrapped in DistributedDataParallel, got {what}; zcomm "
            f"compresses no other gradients: {remedy}"
        )
