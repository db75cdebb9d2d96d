"""Test inputs for the numerics contract, and the bit-by-bit comparison of kernel sets.

The tests and `python -m zcomm.selftest` share this module. Inputs are generated on the CPU from
seeds. Every kernel set, on any device, must produce the bits that the reference produces there.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from zcomm import codecs
from zcomm.codecs import Codec, codec
from zcomm.codecs.layout import Layout, Residuals, Segment

NAMES = list(codecs.SPECS)
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
CPU = torch.device("cpu")

Kind = Callable[[Tensor, torch.Generator, float, float], Tensor]
Storage = torch.dtype | None


def _put(x: Tensor, g: torch.Generator, value: float) -> Tensor:
    x = x.clone()
    x[int(torch.randint(x.numel(), (1,), generator=g))] = value
    return x


def _power(g: torch.Generator, low: int, high: int, size: int = 1) -> Tensor:
    return torch.ldexp(torch.ones(size).double(), torch.randint(low, high, (size,), generator=g))


# Each takes normal samples x (fp64), the generator, and the dtype's smallest normal and largest.
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
    """n elements in patches of `patch`; each patch is of the next kind."""
    info, parts = torch.finfo(dtype), [torch.zeros(0, dtype=torch.float64)]
    for i, start in enumerate(range(0, n, patch)):
        kind = kinds[i % len(kinds)]
        g = torch.Generator().manual_seed(zlib.crc32(f"{kind} {start} {n} {seed}".encode()))
        x = torch.randn(min(patch, n - start), generator=g, dtype=torch.float64)
        x = KINDS[kind](x, g, info.tiny, info.max)
        parts.append(torch.where(x.isfinite(), x.clamp(-info.max, info.max), x))
    return torch.cat(parts).to(dtype)


def stored_residual(c: Codec, r: Tensor, storage: torch.dtype) -> Tensor:
    """The finite fp32 values r as a residual of this storage dtype."""
    if storage == torch.int8:
        body = codec(f"int8:block={c.block or 128}").encode(r, kernels="reference")[32:]
        return body.view(torch.int8).clone()
    largest = torch.finfo(storage).max
    return r.clamp(-largest, largest).to(storage)


@dataclass(frozen=True)
class Case:
    """One input: its size, the first of its kinds (`turn`), and its offset from alignment."""

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
    """A copy of a tensor, `shift` bytes past a 64-byte boundary, with guard bytes around it.

    On devices other than the CPU the shift is in elements, because torch requires tensors to be
    aligned to their element size.
    """

    def __init__(self, t: Tensor, shift: int, device: torch.device = CPU) -> None:
        nbytes = t.nbytes + 256
        if device.type == "cpu":
            whole = bytearray([GUARD]) * nbytes
            self.memory = torch.frombuffer(whole, dtype=torch.uint8)
            self.start = 64 + -self.memory.data_ptr() % 64 + shift
        else:
            self.memory = torch.full((nbytes,), GUARD, dtype=torch.uint8, device=device)
            self.start = 64 + -self.memory.data_ptr() % 64 + shift * t.element_size()
        self.end = self.start + t.nbytes
        if not t.nbytes:
            self.tensor = torch.empty(0, dtype=t.dtype, device=device)
        elif device.type == "cpu":
            self.tensor = torch.frombuffer(whole, dtype=t.dtype, count=t.numel(), offset=self.start)
        else:
            self.tensor = self.memory[self.start : self.end].view(t.dtype)
        self.tensor.copy_(t)

    def intact(self) -> bool:
        """Whether nothing around the tensor was written."""
        around = self.memory.eq(GUARD)
        return bool(around[: self.start].all() and around[self.end :].all())


class Outcome(NamedTuple):
    wire: Tensor
    residual: Tensor
    decoded: Tensor


class Attempt(NamedTuple):
    """A kernel set's results, copied to the CPU, and the memory it must not write but did."""

    outcome: Outcome
    broken: list[str]


class Subject(NamedTuple):
    """What is under test: a kernel set on a device."""

    kernels: str
    device: torch.device = CPU

    def encode(
        self, c: Codec, grad: Tensor, residual: Tensor | None, prescale: float, shift: int
    ) -> Attempt:
        """Encodes with all tensors shifted off alignment by `shift`; `decoded` stays empty."""
        layout = Layout([Segment(c, grad.numel())])
        source, held = Placed(grad, shift, self.device), None
        placed, given = [source], {"gradient": (source, grad)}
        outputs = torch.empty(0)
        if residual is not None:
            old = Placed(residual, shift, self.device)
            new = Placed(torch.zeros_like(residual), shift, self.device)
            held, outputs = Residuals(layout, [old.tensor], [new.tensor]), new.tensor
            placed += [old, new]
            given["residual input"] = old, residual
        empty = torch.full((layout.wire_nbytes,), GUARD, dtype=torch.uint8)
        wire = Placed(empty, shift, self.device)
        layout.encode(source.tensor, held, out=wire.tensor, prescale=prescale, kernels=self.kernels)
        broken = _outside("encode", [*placed, wire]) + _changed("encode", given)
        return Attempt(Outcome(wire.tensor.cpu(), outputs.cpu(), torch.empty(0)), broken)

    def decode(self, c: Codec, wires: Sequence[Tensor], n: int, shift: int) -> Attempt:
        """Sums the wires into `decoded`; the other fields stay empty."""
        placed = [Placed(wire, shift, self.device) for wire in wires]
        out = Placed(torch.full((n,), 7.0), shift, self.device)
        c.decode_sum([p.tensor for p in placed], n, out=out.tensor, kernels=self.kernels)
        given = {f"wire {i}": pair for i, pair in enumerate(zip(placed, wires))}
        broken = _outside("decode", [*placed, out]) + _changed("decode", given)
        empty = torch.empty(0)
        return Attempt(Outcome(empty, empty, out.tensor.cpu()), broken)


def _outside(call: str, placed: Sequence[Placed]) -> list[str]:
    intact = all(p.intact() for p in placed)
    return [] if intact else [f"{call}: expected no writes outside the tensors, got some"]


def _changed(call: str, given: dict[str, tuple[Placed, Tensor]]) -> list[str]:
    found = {name: difference(now.tensor.cpu(), old) for name, (now, old) in given.items()}
    return [f"{name} after {call}: {text}" for name, text in found.items() if text]


@cache
def reference(spec: str, dtype: torch.dtype, storage: Storage, case: Case) -> Outcome:
    """The reference's results for a case, at aligned addresses."""
    c, subject = codec(spec), Subject("reference")
    encoded = subject.encode(c, *inputs(spec, dtype, storage, case), case.prescale, 0)
    decoded = subject.decode(c, [encoded.outcome.wire], case.n, 0)
    assert not encoded.broken + decoded.broken, encoded.broken + decoded.broken
    return encoded.outcome._replace(decoded=decoded.outcome.decoded)


@cache
def inputs(
    spec: str, dtype: torch.dtype, storage: Storage, case: Case
) -> tuple[Tensor, Tensor | None]:
    c = codec(spec)
    return case.gradient(c, dtype), case.residual(c, storage) if storage else None


def bits(t: Tensor) -> Tensor:
    """The bit patterns as integers, so comparisons distinguish NaNs and -0."""
    return t.contiguous().view(INTEGERS[t.element_size()])


def difference(got: Tensor, expected: Tensor) -> str:
    """Where the bits first differ and how many elements differ; "" if none do."""
    if torch.equal(bits(got), bits(expected)):
        return ""
    if got.shape != expected.shape:
        return f"{got.shape} instead of {expected.shape}"
    one, other = (bits(t).flatten() for t in (expected, got))
    where = (one != other).nonzero().flatten()
    i, mask = int(where[0]), (1 << 8 * got.element_size()) - 1
    a, b = (int(t[i]) & mask for t in (one, other))
    return f"{where.numel()} differ; at {i} expected {a:#x}, got {b:#x}"
