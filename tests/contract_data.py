"""The inputs that the contract is tested with, and how they are held and compared bit by bit."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from zcomm import Codec, Layout, Residuals, Segment, codec

NAMES = ["none", "bf16", "fp16", "int8", "fp8", "int4", "lm4", "lm3", "lm2", "sign", "topk:0.01"]
SPECS = [
    *NAMES,
    "int8:block=256",
    "lm4:block=32",
    "lm3:block=1024",
    "int4:block=512",
    "sign:block=64",
    "topk:0.3",
]
GRAD_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STORAGES = [None, torch.float32, torch.bfloat16, torch.int8]
PRESCALES = [1.0, 0.25, 1 / 3, -7.0, 1e-30]
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
GUARD = 0xA5

Kind = Callable[[Tensor, torch.Generator, float, float], Tensor]


def _put(x: Tensor, g: torch.Generator, value: float) -> Tensor:
    x = x.clone()
    x[int(torch.randint(x.numel(), (1,), generator=g))] = value
    return x


def _power(g: torch.Generator, low: int, high: int, size: int = 1) -> Tensor:
    return torch.ldexp(torch.ones(size).double(), torch.randint(low, high, (size,), generator=g))


# Of normal numbers x (fp64), the generator, and the dtype's least normal and largest number.
FINITE_KINDS: dict[str, Kind] = {
    "normal": lambda x, g, tiny, large: x,
    "zeros of both signs": lambda x, g, tiny, large: x * 0.0,
    "outlier": lambda x, g, tiny, large: _put(x, g, large * 0.01),
    "constant": lambda x, g, tiny, large: x[:1].expand(x.shape),
    "near the least normal": lambda x, g, tiny, large: x * tiny,
    "ties": lambda x, g, tiny, large: torch.round(x * 4) / 4,
    "near the largest": lambda x, g, tiny, large: x.clamp(-3, 3) * large * 0.3,
    "subnormal": lambda x, g, tiny, large: x * tiny / 16,
    "wide": lambda x, g, tiny, large: x * _power(g, -140, 120, x.numel()),
    "largest": lambda x, g, tiny, large: torch.sign(x) * large,
    "near the least scale": lambda x, g, tiny, large: x * tiny * _power(g, 0, 11),
    "one alone": lambda x, g, tiny, large: _put(x * 0.0, g, 3.0),
}
KINDS: dict[str, Kind] = FINITE_KINDS | {
    "NaN": lambda x, g, tiny, large: _put(x, g, math.nan),
    "Inf": lambda x, g, tiny, large: _put(x, g, math.inf),
    "-Inf": lambda x, g, tiny, large: _put(x, g, -math.inf),
}


def gradient(
    n: int, kinds: Sequence[str], dtype: torch.dtype, *, patch: int = 128, seed: int = 0
) -> Tensor:
    """n elements; every `patch` of them is of the next kind."""
    info, parts = torch.finfo(dtype), [torch.zeros(0, dtype=torch.float64)]
    for i, start in enumerate(range(0, n, patch)):
        kind = kinds[i % len(kinds)]
        g = torch.Generator().manual_seed(zlib.crc32(f"{kind} {start} {n} {seed}".encode()))
        x = torch.randn(min(patch, n - start), generator=g, dtype=torch.float64)
        x = KINDS[kind](x, g, info.tiny, info.max)
        parts.append(torch.where(x.isfinite(), x.clamp(-info.max, info.max), x))
    return torch.cat(parts).to(dtype)


def stored_residual(c: Codec, r: Tensor, storage: torch.dtype) -> Tensor:
    """Finite fp32 values r in a storage."""
    if storage == torch.int8:
        body = codec(f"int8:block={c.block or 128}").encode(r, kernels="reference")[32:]
        return body.view(torch.int8).clone()
    largest = torch.finfo(storage).max
    return r.clamp(-largest, largest).to(storage)


@dataclass(frozen=True)
class Case:
    """One input: its size, its kinds from the `turn`-th on, and the address modulo 64."""

    n: int
    turn: int = 0
    shift: int = 0

    @property
    def prescale(self) -> float:
        return PRESCALES[(self.n + self.turn) % len(PRESCALES)]

    def gradient(self, c: Codec, dtype: torch.dtype) -> Tensor:
        kinds = list(KINDS if self.turn % 4 == 3 else FINITE_KINDS)
        kinds = kinds[self.turn % len(kinds) :] + kinds[: self.turn % len(kinds)]
        return gradient(self.n, kinds, dtype, patch=c.block or 128, seed=self.turn)

    def residual(self, c: Codec, storage: torch.dtype) -> Tensor:
        kinds = list(FINITE_KINDS)
        r = gradient(self.n, kinds[self.turn % 5 :], torch.float32, patch=c.block or 128, seed=99)
        return stored_residual(c, r, storage)


SIZES = [0, 1, 2, 31, 33, 127, 128, 129, 509, 1021, 1153]
CASES = [Case(n, turn=3 * i + t, shift=(i + t) % 4) for i, n in enumerate(SIZES) for t in (0, 1)]


class Placed:
    """A copy of a tensor `shift` bytes after a 64-byte boundary, with guard bytes around it."""

    def __init__(self, t: Tensor, shift: int) -> None:
        self.memory = bytearray([GUARD]) * (t.nbytes + 256)
        address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.start, self.nbytes = 64 + -address % 64 + shift, t.nbytes
        self.tensor = torch.empty(0, dtype=t.dtype)
        if t.nbytes:
            self.tensor = torch.frombuffer(
                self.memory, dtype=t.dtype, count=t.numel(), offset=self.start
            )
            assert self.tensor.data_ptr() % 64 == shift % 64
        self.tensor.copy_(t)

    def intact(self) -> bool:
        """Whether nothing around the tensor was written."""
        around = self.memory[: self.start] + self.memory[self.start + self.nbytes :]
        return around == bytearray([GUARD]) * len(around)


class Outcome(NamedTuple):
    wire: Tensor
    residual: Tensor
    decoded: Tensor


def run(
    kernels: str,
    spec: str,
    grad: Tensor,
    residual: Tensor | None,
    *,
    prescale: float = 1.0,
    shift: int = 0,
) -> Outcome:
    """Encodes and decodes, all tensors `shift` bytes off alignment; the inputs stay untouched."""
    c, n = codec(spec), grad.numel()
    layout = Layout([Segment(c, n)])
    held = None
    placed = [Placed(grad, shift)]
    outputs = torch.empty(0)
    if residual is not None:
        placed += [Placed(residual, shift), Placed(torch.zeros_like(residual), shift)]
        outputs = placed[2].tensor
        held = Residuals(layout, [placed[1].tensor], [outputs])
    wire = Placed(torch.full((c.wire_nbytes(n),), GUARD, dtype=torch.uint8), shift)
    out = Placed(torch.full((n,), 7.0), shift)
    layout.encode(placed[0].tensor, held, out=wire.tensor, prescale=prescale, kernels=kernels)
    layout.decode(wire.tensor, out=out.tensor, kernels=kernels)
    assert all(p.intact() for p in (*placed, wire, out)), "expected no writes outside the tensors"
    assert_same(placed[0].tensor, grad, "gradient after encode")
    if residual is not None:
        assert_same(placed[1].tensor, residual, "residual input after encode")
    return Outcome(wire.tensor, outputs, out.tensor)


@cache
def reference(spec: str, dtype: torch.dtype, storage: torch.dtype | None, case: Case) -> Outcome:
    """What the reference makes of a case, at aligned addresses."""
    return run_case("reference", spec, dtype, storage, Case(case.n, case.turn))


def run_case(
    kernels: str, spec: str, dtype: torch.dtype, storage: torch.dtype | None, case: Case
) -> Outcome:
    grad, residual = inputs(spec, dtype, storage, case)
    return run(kernels, spec, grad, residual, prescale=case.prescale, shift=case.shift)


@cache
def inputs(
    spec: str, dtype: torch.dtype, storage: torch.dtype | None, case: Case
) -> tuple[Tensor, Tensor | None]:
    c = codec(spec)
    return case.gradient(c, dtype), case.residual(c, storage) if storage else None


def bits(t: Tensor) -> Tensor:
    """The patterns as integers, so that NaN and -0 count."""
    return t.contiguous().view(INTEGERS[t.element_size()])


def assert_same(got: Tensor, expected: Tensor, what: object) -> None:
    if torch.equal(bits(got), bits(expected)):
        return
    assert got.shape == expected.shape, f"{what}: {got.shape} instead of {expected.shape}"
    where = (bits(got) != bits(expected)).nonzero().flatten()
    i, mask = int(where[0]), (1 << 8 * got.element_size()) - 1
    a, b = (int(bits(t)[i]) & mask for t in (expected, got))
    raise AssertionError(f"{what}: {where.numel()} differ; at {i} expected {a:#x}, got {b:#x}")


def assert_same_outcome(got: Outcome, expected: Outcome, what: object) -> None:
    for name in Outcome._fields:
        assert_same(getattr(got, name), getattr(expected, name), f"{name} of {what}")


def canonical_nan(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.tensor(math.nan), x)


def per_block(flags: Tensor, block: int) -> Tensor:
    """Whether any flag of an element's block is set, for every element."""
    rows = torch.nn.functional.pad(flags, (0, -flags.numel() % block)).view(-1, block)
    return rows.any(1).repeat_interleave(block)[: flags.numel()]


def block_scales(body: Tensor, n: int, block: int) -> Tensor:
    """The scale of every element, as int32 bf16 patterns."""
    pairs = body[: 2 * -(-n // block)].view(torch.uint8).view(-1, 2).to(torch.int32)
    return (pairs[:, 0] | pairs[:, 1] << 8).repeat_interleave(block)[:n]
