"""Collectives give the same bits over shared memory as over gloo, and leave the same residuals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from ranks import World, run_ranks
from shared_ranks import difficult, engine_of, group_over, same_bits
from zcomm.codecs import SPECS

# A row of pieces fits as lm4, not as int8: that goes over gloo. Plain numbers always fit.
SMALL_SLOT = 40 << 10
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FEEDBACK: tuple[dict[str, Any], ...] = ({}, {"decay": 0.8, "dtype": torch.bfloat16})


class Case(NamedTuple):
    collective: str
    spec: str
    n: int
    dtype: torch.dtype = torch.float32
    op: str = "mean"
    feedback: dict[str, Any] | None = None


def cases() -> Iterator[Case]:
    """Everything once."""
    for name, spec in product(COLLECTIVES, SPECS):
        if not spec.startswith(("sign", "topk")):
            for dtype in DTYPES:
                yield Case(name, spec, 5801, dtype)
            yield Case(name, spec, 131, op="sum")
            yield from (Case(name, spec, n) for n in (0, 1))
        yield from (Case(name, spec, 5801, feedback=settings) for settings in FEEDBACK)


def long_cases(numel: int) -> Iterator[Case]:
    """Slots are used again and again; some codecs leave the ring in between."""
    for name, spec in product(COLLECTIVES, SPECS):
        yield Case(name, spec, numel, feedback={})
        if not spec.startswith(("sign", "topk")):
            yield Case(name, spec, numel, torch.bfloat16, op="sum")
    for name in COLLECTIVES:
        yield Case(name, "none", numel)
        yield Case(name, "none", numel, torch.float64)


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[World]:
    with World(4) as world:
        yield world


def reduced(x: Tensor, spec: str, group: Any, feedback: Any, op: str) -> Tensor:
    x = x.clone()
    zcomm.all_reduce(x, spec, group, feedback, op=op)
    return x


def scattered(x: Tensor, spec: str, group: Any, feedback: Any, op: str) -> Tensor:
    part = torch.full_like(x[: x.numel() // dist.get_world_size(group)], 7.0)
    whole = x[: part.numel() * dist.get_world_size(group)]
    zcomm.reduce_scatter(part, whole, spec, group, feedback, op=op)
    return part


def gathered(x: Tensor, spec: str, group: Any, feedback: Any, op: str) -> Tensor:
    whole = torch.full((x.numel() * dist.get_world_size(group),), 7.0, dtype=x.dtype)
    zcomm.all_gather(whole, x, spec, group, feedback)
    return whole


COLLECTIVES = {"all_reduce": reduced, "reduce_scatter": scattered, "all_gather": gathered}


def differences(ring: Any, gloo: Any, chosen: Iterable[Case]) -> list[Case]:
    """The cases whose results or residuals differ."""
    found = []
    for case in chosen:
        x = difficult(dist.get_rank(), case.n, case.dtype)
        outcomes = []
        for group in (ring, gloo):
            feedback = None if case.feedback is None else zcomm.Feedback(**case.feedback)
            args = (x, case.spec, group, feedback, case.op)
            results = [COLLECTIVES[case.collective](*args) for _ in range(1 if not feedback else 2)]
            state = feedback.state_dict() if feedback else {}
            outcomes.append([*results, *(t for hop in state.values() for t in hop.values())])
        if not all(map(same_bits, *outcomes)) or len(outcomes[0]) != len(outcomes[1]):
            found.append(case)
    return found


def few_cases() -> Iterator[Case]:
    for name in COLLECTIVES:
        yield from (Case(name, spec, 5801) for spec in ("none", "lm4"))
        yield Case(name, "none", 7, op="sum")  # fewer elements than ranks
    yield Case("all_reduce", "topk:0.01", 40_001, feedback={})
    yield Case("all_reduce", "none", 40_001, torch.float64)


def compare(
    rank: int, world_size: int, count: int, slot_nbytes: int | None, numel: int
) -> list[Case]:
    """Among the first ranks: everything, or with a `numel` the long cases."""
    ring, gloo = (group_over(way, range(count), slot_nbytes) for way in ("ring", "gloo"))
    if ring is None:
        return []
    found = differences(ring, gloo, long_cases(numel) if numel else cases())
    assert engine_of(ring).counters.shared_bytes > 0 == engine_of(gloo).counters.shared_bytes
    return found


def compare_among_many(rank: int, world_size: int) -> list[Case]:
    ring, gloo = (group_over(way, range(world_size)) for way in ("ring", "gloo"))
    return differences(ring, gloo, few_cases())


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_call_has_the_bits_of_gloo(four_ranks: World, count: int) -> None:
    assert four_ranks.run(compare, count, None, 0) == [[]] * 4


@pytest.mark.parametrize("count", [2, 3])
def test_many_chunks_in_small_slots_have_the_bits_of_gloo(four_ranks: World, count: int) -> None:
    assert four_ranks.run(compare, count, SMALL_SLOT, 300_007) == [[]] * 4


def test_sixteen_ranks_have_the_bits_of_gloo() -> None:
    assert run_ranks(16, compare_among_many) == [[]] * 16
