"""Lightning: `Trainer(strategy="ddp", callbacks=[Compress(codec="lm4")])`.

Lightning registers a strategy's `ddp_comm_hook` on CUDA only, without saying so. A callback gets
the wrapped model on every device, when fit begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from zcomm.base import arguments
from zcomm.integrations.registration import Registration, expect_ddp

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError as error:
        raise ImportError(
            "zcomm.integrations.lightning: expected the package lightning, or pytorch-lightning, "
            "got none; use pip install 'zcomm[lightning]'"
        ) from error


class Compress(Registration, Callback):  # type: ignore[misc]
    """Compresses the gradients of `Trainer.fit`; see Registration for the arguments.

    A checkpoint has the residuals of all ranks; rank 0 gathers them when it is saved.
    """

    _saved: Sequence[Mapping[str, Any]] = ()

    @property
    def state_key(self) -> str:
        return "zcomm.Compress"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Runs before Lightning loads a checkpoint: forgets an earlier one."""
        self._saved = ()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        remedy = 'use Trainer(strategy="ddp", devices=...)'
        expect_ddp(strategy.model, f"the strategy {type(strategy).__name__}", remedy)
        if getattr(strategy, "_ddp_comm_hook", None) is not None:
            raise ValueError(
                "Compress: expected a strategy without ddp_comm_hook, got one: torch allows one "
                "hook per model; remove ddp_comm_hook= or the callback"
            )
        self.register(strategy.model, getattr(strategy.precision_plugin, "scaler", None))
        if self._saved:  # a new rank takes the last one's state; residuals in it are refused
            self.load(self._saved[min(dist.get_rank(), len(self._saved) - 1)])

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.close()

    def state_dict(self) -> dict[str, Any]:
        """A collective: the states of all ranks, on rank 0, the only one Lightning saves."""
        if self._handle is None:
            return {}
        first, mine = dist.get_rank() == 0, self._handle.state_dict()
        everyone: list[Any] | None = [None] * dist.get_world_size() if first else None
        dist.gather_object(mine, everyone)
        return {"ranks": everyone or []}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keeps it until fit has wrapped the model."""
        ranks = state_dict.get("ranks")
        if not ranks:
            raise ValueError(
                "Compress.load_state_dict: expected the state of a Compress, with the states of "
                f"all ranks, got {arguments.describe(state_dict)}"
            )
        self._saved = ranks
