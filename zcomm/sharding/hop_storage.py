"""HopStorage: one residual of one item, piece by piece."""

from collections.abc import Iterable

import torch
from torch import Tensor

from zcomm.sharding.chunks import Item, Piece, piece_limit
from zcomm.sharding.owners import cut


class HopStorage:
    """One residual of one item: a tensor for each side, and where each piece lies in it."""

    def __init__(
        self,
        item: Item,
        owners: Iterable[int],
        dtype: torch.dtype,
        sides: int,
        device: torch.device,
    ) -> None:
        limit = piece_limit(item.codec, len(item.bounds) - 1)
        self.item, self.dtype = item, dtype
        self.whole_numel = item.numel  # even if this rank holds only some of its elements
        self._ranges: dict[int, tuple[int, int, int]] = {}
        at = 0
        for r in owners:
            for start, stop in cut(item.bounds[r], item.bounds[r + 1], limit):
                size = item.codec.residual_numel(stop - start, dtype)
                self._ranges[start] = at, at + size, stop - start
                at += size
        self.sides = [torch.zeros(at, dtype=dtype, device=device) for _ in range(sides)]

    def view(self, piece: Piece, side: int) -> Tensor:
        start, stop, _ = self._ranges[piece.start]
        return self.sides[side][start:stop]

    @property
    def numel(self) -> int:
        return sum(self._sizes())

    def read(self, side: int) -> Tensor:
        """The values in the order of the parameter's elements; fp32 and bf16 as stored."""
        stored = self.sides[side]
        if stored.dtype is not torch.int8:
            return stored
        parts = [self.item.codec.read_residual(stored[a:b], n) for a, b, n in self._ranges.values()]
        return torch.cat(parts) if parts else torch.empty(0, device=stored.device)

    def write(self, side: int, values: Tensor) -> None:
        """Overwrites the residual."""
        stored = self.sides[side]
        if stored.dtype is not torch.int8:
            stored.copy_(values)
            return
        parts = torch.split(values.to(stored.device), self._sizes())
        for (start, stop, n), part in zip(self._ranges.values(), parts):
            kept = torch.zeros(n, dtype=torch.bool, device=stored.device)
            to = stored[start:stop]
            to.copy_(self.item.codec.write_residual(part, kept, to))

    def spread(self, side: int) -> Tensor:
        """The values where they belong in the item; zeros where other ranks hold them."""
        values = self.read(side)
        if self.numel == self.item.numel:
            return values
        whole = torch.zeros(self.item.numel, dtype=values.dtype, device=values.device)
        for where, part in zip(self._slices(), torch.split(values, self._sizes())):
            whole[where] = part
        return whole

    def gather(self, side: int, whole: Tensor) -> None:
        """Overwrites the residual with its part of a whole item."""
        if self.numel != self.item.numel:
            parts = [whole[where] for where in self._slices()]
            whole = torch.cat(parts) if parts else whole[:0]
        self.write(side, whole)

    def _slices(self) -> list[slice]:
        return [slice(start, start + n) for start, (*_, n) in self._ranges.items()]

    def _sizes(self) -> list[int]:
        return [n for *_, n in self._ranges.values()]

    def rescale(self, side: int, factor: float) -> None:
        if self.sides[side].dtype is torch.int8:
            self.write(side, self.read(side) * factor)
        else:
            self.sides[side].mul_(factor)
