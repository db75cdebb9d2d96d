"""The contract's inputs, and how tests run kernel sets on them and compare bit by bit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zcomm import codec
from zcomm.conformance.contract import (
    CASES,
    FINITE_KINDS,
    GRAD_DTYPES,
    KINDS,
    NAMES,
    PRESCALES,
    SPECS,
    STORAGES,
    Case,
    Outcome,
    Subject,
    bits,
    difference,
    gradient,
    inputs,
    reference,
    stored_residual,
)

__all__ = [
    "CASES",
    "FINITE_KINDS",
    "GRAD_DTYPES",
    "KINDS",
    "NAMES",
    "PRESCALES",
    "SPECS",
    "STORAGES",
    "Case",
    "Outcome",
    "assert_same",
    "assert_same_outcome",
    "bits",
    "block_scales",
    "canonical_nan",
    "gradient",
    "inputs",
    "per_block",
    "reference",
    "run",
    "run_case",
    "stored_residual",
]


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
    c, subject = codec(spec), Subject(kernels)
    encoded = subject.encode(c, grad, residual, prescale, shift)
    decoded = subject.decode(c, [encoded.outcome.wire], grad.numel(), shift)
    broken = encoded.broken + decoded.broken
    assert not broken, broken
    return encoded.outcome._replace(decoded=decoded.outcome.decoded)


def run_case(
    kernels: str, spec: str, dtype: torch.dtype, storage: torch.dtype | None, case: Case
) -> Outcome:
    grad, residual = inputs(spec, dtype, storage, case)
    return run(kernels, spec, grad, residual, prescale=case.prescale, shift=case.shift)


def assert_same(got: Tensor, expected: Tensor, what: object) -> None:
    found = difference(got, expected)
    assert not found, f"{what}: {found}"


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
