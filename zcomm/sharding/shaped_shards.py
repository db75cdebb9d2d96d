"""ShapedShard: a rank's run of a tensor with dimensions, as torch.distributed.checkpoint sees it.

A checkpoint is made of blocks: an offset and a size in each dimension. A run of elements in the
order of memory is a few of them. With two dimensions, the rest of a row, whole rows, and the
beginning of another row:

    . . . 1 1
    2 2 2 2 2
    2 2 2 2 2
    3 3 . . .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from zcomm.sharding.checkpoint_tensors import StateShard, chunk, write_item

Block = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


class ShapedShard(StateShard):
    """Elements [start, start + numel) of a whole tensor, in the order of its memory."""

    shape_of_whole: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def cut(
        cls, part: Tensor, start: int, shape: Sequence[int], strides: Sequence[int]
    ) -> ShapedShard:
        made = part.detach().as_subclass(cls)
        made.start, made.whole = start, prod(shape)
        made.shape_of_whole, made.strides = torch.Size(shape), tuple(strides)
        return made

    def size(self, dim: int | None = None) -> Any:
        return self.shape_of_whole if dim is None else self.shape_of_whole[dim]

    def to(self, *args: Any, **kwargs: Any) -> ShapedShard:
        """To another device or dtype. (torch would return an ordinary tensor.)"""
        part = self.part().to(*args, **kwargs)
        return ShapedShard.cut(part, self.start, self.shape_of_whole, self.strides)

    def blocks(self) -> dict[tuple[int, ...], Tensor]:
        """Views of this rank's memory as blocks of the whole, by their offsets."""
        # From the outermost dimension in memory to the innermost.
        dims = sorted(range(len(self.strides)), key=lambda dim: -self.strides[dim])
        back = sorted(range(len(dims)), key=dims.__getitem__)
        sizes = [self.shape_of_whole[dim] for dim in dims]
        found, part, end = {}, self.part(), 0
        for offsets, extents in blocks_of_run(sizes, self.start, self.start + part.numel()):
            begin, end = end, end + prod(extents)
            view = part[begin:end].view(extents).permute(back)
            found[tuple(offsets[dim] for dim in back)] = view
        return found

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        shape = self.shape_of_whole
        return [write_item(fqn, at, shape, view) for at, view in self.blocks().items()]

    def __create_chunk_list__(self) -> list[Any]:
        return [chunk(at, view.shape) for at, view in self.blocks().items()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.blocks()[tuple(index.offset)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        place = self.start, self.shape_of_whole, self.strides
        return ShapedShard.cut, (self.part().clone(), *place)


def blocks_of_run(sizes: Sequence[int], start: int, stop: int) -> Iterator[Block]:
    """The blocks that cover elements [start, stop) of a contiguous tensor, in their order."""
    if start >= stop:
        return
    if not sizes:
        yield (), ()
        return
    row = prod(sizes[1:])
    if start % row:
        end = min(stop, start - start % row + row)
        yield from _in_row(sizes, start, end)
        start = end
    rows = (stop - start) // row
    if rows:
        yield (start // row, *[0] * len(sizes[1:])), (rows, *sizes[1:])
        start += rows * row
    if start < stop:
        yield from _in_row(sizes, start, stop)


def _in_row(sizes: Sequence[int], start: int, stop: int) -> Iterator[Block]:
    row = prod(sizes[1:])
    index = start // row
    for offsets, extents in blocks_of_run(sizes[1:], start - index * row, stop - index * row):
        yield (index, *offsets), (1, *extents)
