"""Tensors that are spread over the ranks, as torch.distributed.checkpoint sees them.

It asks a tensor three things: what to write, which parts to read, and the memory of a part. Each of
these classes is this rank's own part, an ordinary tensor that answers for the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zcomm.torch_private.tensors import no_torch_function, without_memory

_MANY_ROWS = 1 << 31


class _Part(Tensor):
    """This rank's part. A copy has only what `__reduce_ex__` returns."""

    __torch_function__ = no_torch_function

    def to(self, *_: object, **__: object) -> Any:
        """How async_save begins, before torch 2.9. A copy on the CPU would not be a part."""
        return self.new_empty()

    def new_empty(self, *_: object, **__: object) -> Any:
        raise RuntimeError(
            "checkpoint: expected torch.distributed.checkpoint.save, got async_save, which cannot "
            "copy parts of tensors; use save, or save copy.deepcopy(opt.state_dict()) in a thread "
            "of your own"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        make, arguments = self.__reduce_ex__(2)  # type: ignore[no-untyped-call]
        return make(*arguments)


class StateShard(_Part):
    """Elements [start, start + numel) of a flat tensor of `whole` elements."""

    start: int
    whole: int

    @classmethod
    def of(cls, part: Tensor, start: int, whole: int) -> StateShard:
        made = part.detach().as_subclass(cls)
        made.start, made.whole = start, whole
        return made

    def part(self) -> Tensor:
        """The same memory as an ordinary tensor."""
        return self.as_subclass(Tensor)

    def size(self, dim: int | None = None) -> Any:
        """That of the whole: what a checkpoint compares before it reads."""
        return torch.Size([self.whole]) if dim is None else self.whole

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        return [write_item(fqn, (self.start,), (self.whole,), self.part())] if self.numel() else []

    def __create_chunk_list__(self) -> list[Any]:
        return [chunk((self.start,), self.part().shape)] if self.numel() else []

    def __get_tensor_shard__(self, index: object) -> Tensor:
        return self.part()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy: a view would be written with all of its memory.
        return StateShard.of, (self.part().clone(), self.start, self.whole)


class SharedCopy(StateShard):
    """A tensor that is the same on all ranks: each writes its run, and reads the whole."""

    everything: Tensor
    reading: bool

    @classmethod
    def over(cls, run: Tensor, start: int, everything: Tensor) -> SharedCopy:
        made = run.detach().as_subclass(cls)
        made.start, made.whole, made.everything = start, everything.numel(), everything
        made.reading = False
        return made

    def __create_chunk_list__(self) -> list[Any]:
        self.reading = True
        return [chunk((0,), (self.whole,))]

    def __get_tensor_shard__(self, index: object) -> Tensor:
        return self.everything if self.reading else self.part()


class ResidualRow(_Part):
    """One rank's residual of a parameter: a row of a matrix with a row for each rank.

    A checkpoint of any number of ranks can be read. Each rank takes the row of its number, and the
    last one all that are left: rows are summed, so the sum over the ranks stays what it was. Where
    ranks share the elements of a residual (`sharers`), each takes its own of all of their rows.
    """

    storage_: Any  # what holds the residual
    side: int
    rank: int
    world_size: int
    sharers: tuple[int, ...]
    total: _Total | None  # what was read

    @classmethod
    def of(
        cls, storage: Any, side: int, rank: int, world_size: int, sharers: Sequence[int] = ()
    ) -> ResidualRow:
        made = torch.empty(0).as_subclass(cls)
        made.storage_, made.side, made.total = storage, side, None
        made.rank, made.world_size = rank, world_size
        made.sharers = tuple(sharers) or (rank,)
        return made

    @property
    def length(self) -> int:
        return int(self.storage_.whole_numel)

    def size(self, dim: int | None = None) -> Any:
        return _AnyRows(self.length)

    def values(self) -> Tensor:
        """As it is now, or as it was read; fp32 or bf16."""
        if self.total is not None:
            return self.total.values
        held: Tensor = self.storage_.spread(self.side)
        return held

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        numel = self.length
        dtype = torch.bfloat16 if self.storage_.dtype is torch.bfloat16 else torch.float32
        like = torch.empty(1, dtype=dtype).expand(1, numel)
        return [write_item(fqn, (self.rank, 0), (self.world_size, numel), like)]

    def __create_chunk_list__(self) -> list[Any]:
        last = self.world_size - 1
        self.total = _Total(self.length)
        return [chunk((r, 0), (1 if r < last else _MANY_ROWS, self.length)) for r in self.sharers]

    def __get_tensor_shard__(self, index: object) -> Tensor:
        if self.total is None:
            return self.values().view(1, -1)
        return _RowSum(self.total, _MANY_ROWS)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return SavedRow, (self.values().clone(), self.rank, self.world_size, self.sharers)


class SavedRow:
    """A ResidualRow without its optimizer: in a pickle, or in a copy of a state."""

    def __init__(self, saved: Tensor, rank: int, world_size: int, sharers: tuple[int, ...]) -> None:
        self.saved, self.rank, self.world_size = saved, rank, world_size
        self.sharers = sharers

    def values(self) -> Tensor:
        return self.saved


class _AnyRows:
    """A size that any number of rows fits. (torch.Size, which is compared with it, asks it.)"""

    def __init__(self, numel: int) -> None:
        self._numel = numel

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and len(other) == 2 and other[1] == self._numel

    def __repr__(self) -> str:
        return f"[any number of ranks, {self._numel}]"

    __hash__ = None  # type: ignore[assignment]


class _Total:
    """The sum of rows; the first one as it is, to the sign of its zeros."""

    def __init__(self, numel: int) -> None:
        self.values = torch.zeros(numel)
        self._rows = 0

    def add(self, row: Tensor) -> None:
        self.values.add_(row) if self._rows else self.values.copy_(row)
        self._rows += 1


class _RowSum(Tensor):
    """Memory as a checkpoint wants it: what is copied into its rows goes into one sum."""

    total: _Total

    @staticmethod
    def __new__(cls, total: _Total, rows: int) -> _RowSum:
        size = (rows, total.values.numel())
        made: _RowSum = without_memory(cls, size, dtype=total.values.dtype)
        made.total = total
        return made

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten, rows = torch.ops.aten, args[0]
        if func is aten.detach.default:
            return cls(rows.total, rows.shape[0])
        if func is aten.slice.Tensor and args[1] == 0:
            return cls(rows.total, args[3] - args[2])
        if func is aten.copy_.default and isinstance(rows, cls):
            for row in args[1]:
                rows.total.add(row)
            return rows
        raise RuntimeError(f"residual rows: expected to be filled by a checkpoint, got {func}")


def chunk(offsets: Any, sizes: Any) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def write_item(fqn: str, offsets: Any, whole: Any, part: Tensor) -> Any:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    return WriteItem(
        index=MetadataIndex(fqn, torch.Size(offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk(offsets, part.shape),
            properties=TensorProperties.create_from_tensor(part),
            size=torch.Size(whole),
        ),
    )
