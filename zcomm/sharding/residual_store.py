"""ResidualStore: the residuals of many items, keyed by parameter.

An item has two residuals: `sent`, of all its elements as this rank encodes them for their owners,
and `owned`, of the mean of this rank's own run, which is encoded once more for all ranks. Both are
in units of the mean gradient. They belong to the parameter; buckets and chunks only view parts of
them. With hosts, `sent` is that of the hop between hosts: it has what the owners own whose deputy
this rank is.

    full feedback      e <- v - decode(v)
    with a decay d     e <- d * e + (1 - d) * (v - decode(v))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcomm.codecs.layout import Layout
from zcomm.codecs.residuals import Residuals
from zcomm.kernels import cpu
from zcomm.sharding.chunks import Chunk, Item, Piece
from zcomm.sharding.hierarchy import Hosts
from zcomm.sharding.hop_storage import HopStorage
from zcomm.torch_private import foreach

HOPS = ("sent", "owned")
# How an item is fed back: not at all, in full, or with a decay.
Mode = bool | float
ModeOf = Callable[[Item], Mode]


class Hop:
    """The residuals of one layout, from one side (before the step) to the other (after it)."""

    def __init__(self, residuals: Residuals, decayed: Sequence[_Decayed]) -> None:
        self.residuals = residuals
        self._decayed = decayed
        self.averages = bool(decayed)

    def average(self) -> None:
        """After the encoding: residuals with a decay become averages."""
        for old, left, new, decay in self._decayed:
            if new is not old:
                foreach.copy_(new, old)
            foreach.lerp_(new, left, 1 - decay)


class _Decayed(NamedTuple):
    """Residuals with one decay: the old ones, what the wire left out, and the new ones."""

    old: list[Tensor]
    left: list[Tensor]
    new: list[Tensor]
    decay: float


class ChunkFeedback(NamedTuple):
    """The residuals of a chunk's two encodings."""

    sent: Hop | None
    owned: Hop | None


class BoundFeedback(list[ChunkFeedback]):
    """The residuals of all chunks of a tensor, for one side."""

    @cached_property
    def is_empty(self) -> bool:
        return all(hop is None for chunk in self for hop in chunk)

    @cached_property
    def averages(self) -> bool:
        """Whether some become averages after the encoding."""
        return any(hop is not None and hop.averages for chunk in self for hop in chunk)

    @cached_property
    def sent_tables(self) -> Any:
        """For native code."""
        return _tables(chunk.sent for chunk in self)

    @cached_property
    def owned_tables(self) -> Any:
        """For native code."""
        return _tables(chunk.owned for chunk in self)


def _tables(hops: Iterable[Hop | None]) -> Any:
    return cpu.residual_tables(None if hop is None else hop.residuals for hop in hops)


class ResidualStore:
    """Residuals of one tensor or of many parameters, on one device. They start as zeros.

    `double_buffered` keeps two sides: a step reads one and writes the other, and flip() accepts
    what it wrote. `record_stream` is called with every tensor that is made, because another stream
    than the maker's will use it.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        double_buffered: bool = False,
        hosts: Hosts | None = None,
        record_stream: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.dtype, self.device, self.hosts = dtype, device, hosts
        self.double_buffered = double_buffered
        self.side = 0  # which side holds the residuals
        self._record_stream = record_stream
        self._held: dict[str, _Held] = {}
        self._scratch = torch.empty(0, device="cpu")

    def bind(
        self, chunks: Sequence[Chunk], rank: int, mode: ModeOf, gather: bool = True
    ) -> list[BoundFeedback]:
        """The residuals of each chunk, for each side that a step may start from.

        Without `gather` there is no second hop, and nothing is held for it.
        """
        items = {p.item.key: p.item for c in chunks for p in c.pieces}.values()
        owners = chunks[0].coded.senders if chunks else ()
        self.hold((item for item in items if mode(item) is not False), rank, gather, owners)
        longest = max((c.numel for c in chunks), default=0)
        if self._scratch.numel() < longest and any(
            isinstance(mode(p.item), float) for c in chunks for p in c.pieces
        ):
            self._scratch = self._recorded(
                torch.zeros(longest, dtype=self.dtype, device=self.device)
            )
        sides = range(2 if self.double_buffered else 1)
        return [
            BoundFeedback(self._bind_chunk(c, side, mode, gather) for c in chunks) for side in sides
        ]

    def flip(self) -> None:
        """Accepts the step: what it wrote becomes the residuals."""
        if self.double_buffered:
            self.side = 1 - self.side

    def rescale(self, factor: float) -> None:
        """Multiplies all residuals: the loss scale has changed."""
        for hop in self._hops():
            hop.rescale(self.side, factor)

    def nbytes(self) -> int:
        stored = sum(t.nbytes for hop in self._hops() for t in hop.sides)
        return stored + self._scratch.nbytes

    def _hops(self) -> list[HopStorage]:
        return [hop for held in self._held.values() for hop in held if hop is not None]

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the residuals: {"sent": {name: tensor}, "owned": {name: tensor}}."""
        return {
            hop: {key: s.sides[self.side].clone() for key, s in self.held(hop).items()}
            for hop in HOPS
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Overwrites the residuals; refuses other names or sizes before anything is written."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for hop in HOPS:
            saved, storages = state[hop], self.held(hop)
            _expect_same_names(hop, storages, saved)
            for key, storage in storages.items():
                mine = storage.sides[self.side]
                if mine.shape != saved[key].shape or mine.dtype is not saved[key].dtype:
                    raise ValueError(
                        f"residuals of {key!r} ({hop}): expected {tuple(mine.shape)} {mine.dtype}, "
                        f"got {tuple(saved[key].shape)} {saved[key].dtype}; world size, codec and "
                        "residual_dtype must be those of the saved run"
                    )
                pairs.append((mine, saved[key]))
        for mine, theirs in pairs:
            mine.copy_(theirs)

    def held(self, hop: str) -> dict[str, HopStorage]:
        """The residuals of one hop, by parameter."""
        storages = {key: getattr(held, hop) for key, held in self._held.items()}
        return {key: storage for key, storage in storages.items() if storage is not None}

    def hold(self, items: Iterable[Item], rank: int, gather: bool, owners: Collection[int]) -> None:
        """Makes zero residuals for items that have none yet, of what `owners` own: those to whom
        this rank sends."""
        for item in items:
            if item.key not in self._held:
                self._held[item.key] = _Held(
                    self._new_storage(item, sorted(owners)),
                    self._new_storage(item, [rank]) if gather else None,
                )

    def keep(self, names: Iterable[str]) -> None:
        """Drops the residuals of all other items."""
        kept = set(names)
        self._held = {name: held for name, held in self._held.items() if name in kept}

    def _new_storage(self, item: Item, owners: Iterable[int]) -> HopStorage:
        sides = 2 if self.double_buffered else 1
        made = HopStorage(item, owners, self.dtype, sides, self.device)
        for t in made.sides:
            self._recorded(t)
        return made

    def _recorded(self, t: Tensor) -> Tensor:
        if self._record_stream is not None:
            self._record_stream(t)
        return t

    def _bind_chunk(self, chunk: Chunk, side: int, mode: ModeOf, gather: bool) -> ChunkFeedback:
        coded = chunk.coded
        sent = self._bind_hop(coded.wire, coded.pieces, "sent", side, mode)
        if not gather:
            return ChunkFeedback(sent, None)
        owned = self._bind_hop(coded.own, coded.own_pieces, "owned", side, mode)
        return ChunkFeedback(sent, owned)

    def _bind_hop(
        self, layout: Any, pieces: Sequence[Piece], hop: str, side: int, mode: ModeOf
    ) -> Hop | None:
        inputs: list[Tensor | None] = []
        outputs: list[Tensor | None] = []
        decayed: dict[float, _Decayed] = {}
        at = 0
        for piece in pieces:
            how = mode(piece.item)
            if how is False:
                inputs.append(None)
                outputs.append(None)
                continue
            storage: HopStorage = getattr(self._held[piece.item.key], hop)
            old = storage.view(piece, side)
            new = storage.view(piece, 1 - side) if self.double_buffered else old
            inputs.append(old)
            if how is True:
                outputs.append(new)
                continue
            # What is left out goes to scratch memory first, then into the average.
            left = self._scratch[at : at + old.numel()]
            at += old.numel()
            outputs.append(left)
            group = decayed.setdefault(how, _Decayed([], [], [], how))
            group.old.append(old)
            group.left.append(left)
            group.new.append(new)
        if not isinstance(layout, Layout) or all(t is None for t in inputs):
            return None
        in_place = all(a is b for a, b in zip(inputs, outputs))
        residuals = Residuals(layout, inputs, None if in_place else outputs)
        groups = [
            g._replace(new=g.new if self.double_buffered else g.old) for g in decayed.values()
        ]
        return Hop(residuals, groups)


class _Held(NamedTuple):
    sent: HopStorage
    owned: HopStorage | None


def _expect_same_names(hop: str, held: Mapping[str, object], saved: Mapping[str, object]) -> None:
    missing, extra = sorted(set(held) - set(saved)), sorted(set(saved) - set(held))
    if missing or extra:
        raise ValueError(
            f"residuals ({hop}): expected those of the same parameters, got none for "
            f"{missing or 'none'} and unknown ones {extra or 'none'}"
        )
