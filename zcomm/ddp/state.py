"""What a hook saves: residuals, and where in training they belong."""

from collections.abc import Mapping
from typing import Any

from zcomm.base import arguments
from zcomm.ddp.compressor import DdpCompressor
from zcomm.engine.handle import SavedState

_STATE_VERSION = 1


class HookSavedState(SavedState):
    """This rank's residuals, keyed by parameter name, and the step."""

    def __init__(self, compressor: DdpCompressor) -> None:
        self._compressor = compressor

    def state_dict(self) -> dict[str, Any]:
        compressor = self._compressor
        compressor.synchronize()
        compressor.buckets.hold_all()
        return {
            "version": _STATE_VERSION,
            "step": compressor.step,
            "scale": compressor.scale,
            "rank": compressor.rank,
            "world_size": compressor.world_size,
            "hosts": str(compressor.feedback.hosts),
            "codecs": {name: item.codec.spec for name, item in compressor.buckets.items.items()},
            "residuals": compressor.feedback.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where the state was saved; refuses that of another run before it writes."""
        mine, rank = self.state_dict(), self._compressor.rank
        if not isinstance(state, Mapping) or set(state) != set(mine):
            got = str(sorted(state)) if isinstance(state, Mapping) else arguments.describe(state)
            raise ValueError(
                f"rank {rank}: load_state_dict: expected what handle.state_dict() returned, "
                f"a dict with {sorted(mine)}, got {got}"
            )
        for field in ("version", "world_size", "rank", "hosts", "codecs"):
            if state[field] != mine[field]:
                expected, got = arguments.first_difference(mine[field], state[field])
                raise ValueError(
                    f"rank {rank}: load_state_dict: expected {field} {expected}, got {got}; load "
                    "each rank's own state into the same model, codecs and number of ranks"
                )
        self._compressor.feedback.load_state_dict(state["residuals"])
        self._compressor.step = int(state["step"])
        self._compressor.scale = float(state["scale"])
