"""Codec: the object users hold. Calling one is the one-segment case of a Layout."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NoReturn

import torch
from torch import Tensor

from zcomm.base import arguments, cupy_arrays
from zcomm.codecs import arithmetic, residual_storage
from zcomm.codecs.format import Format
from zcomm.codecs.layout import Layout, Segment
from zcomm.wire import header as wire
from zcomm.wire.segments import Encoded

_NEW_RESIDUAL = "make one with new_residual"


class Codec:
    """A way to encode gradients. Immutable, hashable, and equal to any codec with the same spec.

    Create one with `zcomm.codec("lm4")`. Gradients are contiguous fp32, bf16 or fp16 of any shape.
    `error` is the normalized squared error of one encoding of Gaussian values. A codec with
    `needs_feedback` drops so much that training fails without feedback. `default_feedback` is what
    `feedback=None` means for this codec: none, full, or a decay.
    """

    _COPIED = ("name", "spec", "id", "block", "error", "needs_feedback", "default_feedback")
    __slots__ = ("format", "log2_block", *_COPIED)

    format: Format
    name: str
    spec: str
    id: int
    block: int
    log2_block: int
    error: float
    needs_feedback: bool
    default_feedback: bool | float

    def __init__(self, format: Format) -> None:
        object.__setattr__(self, "format", format)
        object.__setattr__(self, "log2_block", max(format.block.bit_length() - 1, 0))
        for field in self._COPIED:
            object.__setattr__(self, field, getattr(format, field))

    def k(self, n: int) -> int:
        """How many of n elements topk sends; 0 for other codecs."""
        return self.format.k(_count(n))

    def body_nbytes(self, n: int) -> int:
        """The bytes of an n-element segment, without its frame."""
        return self.format.body_nbytes(_count(n))

    def wire_nbytes(self, n: int) -> int:
        """The bytes of an n-element wire: header and body."""
        return wire.HEADER_NBYTES + self.body_nbytes(n)

    def residual_numel(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        """Elements in a residual with this storage dtype: n, or the bytes of an int8 body."""
        if dtype not in arguments.RESIDUAL_DTYPES:
            names = arguments.dtype_names(arguments.RESIDUAL_DTYPES)
            raise ValueError(f"{self.spec}: expected residual dtype {names}, got {dtype}")
        return residual_storage.numel(_count(n), self.block, dtype)

    def new_residual(
        self,
        n: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """A residual of zeros for n elements."""
        return torch.zeros(self.residual_numel(n, dtype), dtype=dtype, device=device)

    def encode(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        out: Tensor | None = None,
        prescale: float = 1.0,
        verify: bool = True,
        kernels: str | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """The wire of x * prescale + residual, as a 1-D uint8 tensor.

        Overwrites `residual` with what the wire leaves out, and `out`, if given, with the wire.
        `verify` adds a checksum. `threads` defaults to torch.get_num_threads(), here and in decode
        and decode_sum. All three accept CuPy arrays in place of tensors and then return one.
        """
        if not isinstance(x, Tensor) and cupy_arrays.is_array(x):
            arrays = {"x": x, "residual": residual, "out": out}
            settings = {"prescale": prescale, "verify": verify, "kernels": kernels}
            return cupy_arrays.call(self.encode, arrays, {**settings, "threads": threads})
        grad = arguments.flat(x, "gradient", "use .contiguous()")
        held = None if residual is None else (arguments.flat(residual, "residual", _NEW_RESIDUAL),)
        return _layout(self, grad.numel()).encode(
            grad,
            held,
            out=out,
            prescale=prescale,
            verify=verify,
            kernels=kernels,
            threads=threads,
        )

    def decode(
        self,
        wire: Tensor,
        n: int,
        *,
        out: Tensor | None = None,
        verify: bool = True,
        kernels: str | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """The n fp32 elements of a wire. Overwrites `out` if given. Bad wires raise a WireError."""
        return self.decode_sum((wire,), n, out=out, verify=verify, kernels=kernels, threads=threads)

    def decode_sum(
        self,
        wires: Sequence[Tensor] | Tensor,
        n: int,
        *,
        out: Tensor | None = None,
        verify: bool = True,
        kernels: str | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """The fp32 sum of wires (a sequence, or the rows of a 2-D tensor), in their order.

        Overwrites `out` if given. A malformed wire raises a WireError and leaves `out` undefined.
        """
        if not isinstance(wires, Tensor) and cupy_arrays.has_arrays(wires):
            settings = {"n": n, "verify": verify, "kernels": kernels, "threads": threads}
            return cupy_arrays.call(self.decode_sum, {"wires": wires, "out": out}, settings)
        layout = _layout(self, _count(n))
        target = None if out is None else _whole(out, layout.span)
        total = layout.decode_sum(
            wires, out=target, verify=verify, kernels=kernels, threads=threads
        )
        return total if out is None else out

    def encode_body(self, v: Tensor) -> Encoded:
        """The plain-torch reference: the body of fp32 values v, n > 0."""
        return self.format.encode_body(v)

    def decode_body(self, body: Tensor, n: int) -> Tensor:
        """The plain-torch reference: the terms of one body, to be summed over wires."""
        return self.format.decode_body(body, n)

    def finish_sum(self, terms: Tensor, n: int) -> Tensor:
        """The plain-torch reference: the decoded elements, from the summed terms."""
        return arithmetic.canonical_nan(self.format.finish_sum(terms, n))

    def read_residual(self, stored: Tensor, n: int) -> Tensor:
        """The plain-torch reference: a stored residual as fp32."""
        return residual_storage.read(stored, n, self.block)

    def write_residual(self, r: Tensor, kept: Tensor, stored: Tensor) -> Tensor:
        """The plain-torch reference: r in storage form; kept elements come from `stored`."""
        return residual_storage.write(r, kept, stored, self.block)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Codec) and self.spec == other.spec)

    def __hash__(self) -> int:
        return hash(self.spec)

    def __repr__(self) -> str:
        return f"codec({self.spec!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return Codec, (self.format,)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{self!r} is immutable: make another with codec(spec)")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self!r} is immutable")


# Callers check counts first: as cache keys, 1000.0 and True equal 1000 and 1.
@lru_cache(maxsize=128)
def _layout(codec: Codec, n: int) -> Layout:
    return Layout((Segment(codec, n),))


def _count(n: int) -> int:
    return arguments.count(n, "an element count n", remedy="; use x.numel()")


def _whole(out: Tensor, n: int) -> Tensor:
    target = arguments.flat(out, "out", "use torch.empty(shape)")
    if target.numel() != n:
        raise ValueError(f"expected out of {n} elements, got {target.numel()}")
    return target
