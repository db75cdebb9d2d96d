"""Handle: what zcomm.compress and zcomm.fsdp.compress return."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from zcomm.engine.compressor import Compressor
from zcomm.engine.counters import Stats
from zcomm.engine.tuning.choice import Choice


class SavedState(ABC):
    """What a compressed model saves, and how it continues from that."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Handle:
    """A compressed model: what was sent, and its state for checkpoints.

    It may be an attribute of its model. A copy of the model, as copy.deepcopy and torch.save make
    it, has no hook; its handle says so when it is used.
    """

    def __init__(self, compressor: Compressor, saved: SavedState) -> None:
        self._parts: tuple[Compressor, SavedState] | None = compressor, saved

    def __reduce__(self) -> Any:
        return _copied, ()

    def _model(self) -> tuple[Compressor, SavedState]:
        if self._parts is None:
            raise RuntimeError(
                "zcomm.Handle: expected the handle of a compressed model, got that of its copy, "
                "which has no hook; wrap the copy and call zcomm.compress on it"
            )
        return self._parts

    @property
    def _compressor(self) -> Compressor:
        return self._model()[0]

    @property
    def _saved(self) -> SavedState:
        return self._model()[1]

    def stats(self) -> Stats:
        """Totals of this rank since the model was compressed."""
        return self._compressor.stats()

    @property
    def transport(self) -> str:
        """What gradients go over: "shared memory", or a backend and why not shared memory, such as
        "gloo: the ranks of the group are on several hosts"."""
        return self._compressor.transport()

    @property
    def choice(self) -> Choice | None:
        """What codec="auto" has chosen, and why; None if a codec was given. Print it; `codec` is
        the codec, `options` has what was expected of each, and `str(handle.choice)` says how to pin
        it. It may change once, after the first steps of training."""
        return self._compressor.choice()

    def buffer_nbytes(self) -> int:
        """Memory that the engine holds, apart from residuals; its shared segment is part of it."""
        return self._compressor.buffer_nbytes()

    def residual_nbytes(self) -> int:
        """Memory that residuals take on this rank."""
        return self._compressor.feedback.nbytes()

    def state_dict(self) -> dict[str, Any]:
        """Residuals, keyed by parameter name, and the step. Call it between steps.

        For DDP it belongs to this rank and number of ranks. For FSDP2 torch.distributed.checkpoint
        loads it at any number of ranks.
        """
        return self._saved.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was saved, with the same model and codecs."""
        self._saved.load_state_dict(state)

    def remove(self) -> None:
        """FSDP2: the same as close(). torch cannot remove a DDP comm hook, and this says so."""
        self._compressor.remove()

    def close(self) -> None:
        """Ends the engine. A DDP model cannot be trained with this hook afterwards; an FSDP2 model
        continues with torch's own collectives, and all ranks must call it."""
        self._compressor.close()

    def __repr__(self) -> str:
        if self._parts is None:
            return "<zcomm.Handle: of a copy, which has no hook>"
        return f"<zcomm.Handle: {self._compressor.describe()}; {self.transport}>"


def _copied() -> Handle:
    copy = Handle.__new__(Handle)
    copy._parts = None
    return copy
