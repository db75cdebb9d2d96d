"""Feedback: what a caller of the collectives keeps for one tensor, from step to step."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zcomm.base import arguments
from zcomm.sharding.chunks import Chunk
from zcomm.sharding.hierarchy import Hosts
from zcomm.sharding.residual_store import BoundFeedback, Mode, ResidualStore


class Feedback:
    """The residuals of one tensor, for zcomm.all_reduce and the other collectives.

    Use one object for one tensor, at every step. Residuals start as zeros at its first use. `decay`
    between 0 and 1 averages residuals; `dtype` stores them as fp32, bf16 or int8.
    """

    def __init__(self, decay: float | None = None, *, dtype: torch.dtype = torch.float32) -> None:
        self.decay = None if decay is None else checked_decay(decay)
        self.mode: Mode = True if self.decay is None else self.decay
        if dtype not in arguments.RESIDUAL_DTYPES:
            known = arguments.dtype_names(arguments.RESIDUAL_DTYPES)
            raise ValueError(f"Feedback: expected dtype {known}, got {dtype}")
        if dtype is torch.int8 and decay is not None:
            raise ValueError("Feedback: expected no decay with torch.int8 residuals, got one")
        self.dtype = dtype
        self._bound: _Bound | None = None

    def bind(
        self,
        call: str,
        chunks: Sequence[Chunk],
        rank: int,
        device: torch.device,
        hosts: Hosts | None,
        record_stream: Callable[[Tensor], None] | None,
    ) -> BoundFeedback:
        """The residuals of a call's chunks, made at its first use; refuses another call."""
        if device.type != "cpu":
            call = f"{call} on {device}"
        if self._bound is None:
            store = ResidualStore(self.dtype, device, hosts=hosts, record_stream=record_stream)
            bound = store.bind(chunks, rank, lambda item: self.mode)[0]
            self._bound = _Bound(call, chunks, store, bound)
        if self._bound.call != call:
            raise ValueError(
                f"feedback: expected the call that it was first used with ({self._bound.call}), "
                f"got {call}; use one zcomm.Feedback() for each tensor"
            )
        if not _are_equal(self._bound.made_for, chunks):
            raise ValueError(
                "feedback: expected the group that it was first used with, got one of other ranks "
                "or over another transport; use one zcomm.Feedback() for each tensor and group"
            )
        return self._bound.chunks

    def rescale(self, factor: float) -> None:
        """Multiplies the residuals."""
        if self._bound is not None:
            self._bound.store.rescale(factor)

    def nbytes(self) -> int:
        return 0 if self._bound is None else self._bound.store.nbytes()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the residuals: {"sent": {name: tensor}, "owned": {name: tensor}}."""
        if self._bound is None:
            return {"sent": {}, "owned": {}}
        return self._bound.store.state_dict()

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Overwrites the residuals; refuses other names or sizes before it writes anything."""
        store = ResidualStore(self.dtype, torch.device("cpu"))
        (store if self._bound is None else self._bound.store).load_state_dict(state)


class _Bound(NamedTuple):
    """The call that a Feedback belongs to, and its residuals."""

    call: str
    made_for: Sequence[Chunk]
    store: ResidualStore
    chunks: BoundFeedback


def _are_equal(one: Sequence[Chunk], other: Sequence[Chunk]) -> bool:
    if one is other:
        return True
    layouts = zip(one, other)
    return len(one) == len(other) and all(
        (a.wire, a.own, a.coded.wire) == (b.wire, b.own, b.coded.wire) for a, b in layouts
    )


def checked_decay(decay: object) -> float:
    """A decay as a float; refuses what is not between 0 and 1."""
    if isinstance(decay, bool) or not isinstance(decay, (int, float)):
        raise TypeError(
            f"feedback: expected a decay between 0 and 1, got {arguments.describe(decay)}"
        )
    if not 0 < decay < 1:
        raise ValueError(f"feedback: expected a decay between 0 and 1, got {decay}")
    return float(decay)
