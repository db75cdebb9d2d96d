"""Calls that only some ranks make: they end within timeout_s and say who did not come."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import optim
from torch.nn.parallel import DistributedDataParallel

import zcomm
from failing_training import backward, model
from raised import Raised, raised
from ranks import OVER_GLOO, World, run_ranks
from zcomm.torch_private import c10d

TIMEOUT_S = 1.5
ABSENT = 1


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[World]:
    with World(3) as world:
        yield world


def compress(rank: int) -> Callable[[], Any]:
    ddp = model()
    return lambda: zcomm.compress(ddp, timeout_s=TIMEOUT_S)


def zero(rank: int) -> Callable[[], Any]:
    ddp = model()
    return lambda: zcomm.ZeroOptimizer(ddp, optim.SGD, lr=0.1, timeout_s=TIMEOUT_S)


def first_backward(rank: int, world_size: int) -> Raised:
    ddp = model()
    ddp.register_comm_hook(zcomm.HookState(timeout_s=TIMEOUT_S), zcomm.hook)
    return raised(lambda: backward(ddp) if rank != ABSENT else None)


def consolidated_state_dict(rank: int) -> Callable[[], Any]:
    optimizer = zero(rank)()
    return lambda: optimizer.consolidated_state_dict(0)


def load_state_dict(rank: int) -> Callable[[], Any]:
    optimizer = zero(rank)()
    state = optimizer.consolidated_state_dict(0)
    return lambda: optimizer.load_state_dict(state)


def first_collective(rank: int) -> Callable[[], Any]:
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=TIMEOUT_S))
    return lambda: zcomm.all_reduce(torch.ones(100), group=group)


CALLS = {
    "compress": compress,
    "ZeroOptimizer": zero,
    "consolidated_state_dict": consolidated_state_dict,
    "load_state_dict": load_state_dict,
    "all_reduce": first_collective,
}


def call_without_one(rank: int, world_size: int, name: str) -> tuple[Raised, Raised]:
    """All but one rank call; then, when they have given up, all do."""
    call = CALLS[name](rank)
    first = raised(call if rank != ABSENT else lambda: None)
    dist.barrier()
    return first, raised(call)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_one_rank_does_not_make_ends_in_time(three_ranks: World, name: str) -> None:
    found = three_ranks.run(call_without_one, name)
    for rank in (0, 2):
        first = found[rank][0]
        assert first.type == "CommunicationError", first.text
        instead = r"(it has called nothing of zcomm|its last call of zcomm was \w+)"
        start = rf"rank {rank}: {name}: rank 1 \({instead}\) did not come within {TIMEOUT_S} s; "
        assert re.match(start, first.text), first.text
        assert first.seconds < TIMEOUT_S + 2
    # A retry meets, though the ranks have called a different number of times.
    assert [again.text for _, again in found] == ["None"] * 3


def test_a_first_backward_that_one_rank_does_not_run_ends_in_time(three_ranks: World) -> None:
    found = three_ranks.run(first_backward)
    for rank in (0, 2):
        assert found[rank].type == "CommunicationError", found[rank].text
        start = f"rank {rank}: the first backward with HookState: rank 1 (it"
        assert found[rank].text.startswith(start)
        assert found[rank].seconds < TIMEOUT_S + 2


def call_with_one_bad_argument(rank: int, world_size: int) -> list[Raised]:
    ddp, other = model(), model()
    codec = "lm5" if rank == ABSENT else "lm4"
    optimizer = zero(rank)()
    return [
        raised(optimizer.consolidated_state_dict, 7 if rank == ABSENT else 0),
        raised(zcomm.compress, ddp, codec),
        raised(zcomm.ZeroOptimizer, other, optim.SGD, lr=0.1, codec=codec),
        raised(zcomm.compress, ddp),
    ]


def test_a_bad_argument_on_one_rank_ends_the_call_for_all_at_once(three_ranks: World) -> None:
    found = three_ranks.run(call_with_one_bad_argument)
    for rank, errors in enumerate(found):
        for error, name in zip(errors, ("consolidated_state_dict", "compress", "ZeroOptimizer")):
            if rank == ABSENT:
                assert error.is_value_error
            else:
                assert error.type == "CommunicationError"
                assert error.text.startswith(f"rank {rank}: {name}: rank 1 failed: ValueError: ")
            assert error.seconds < 5  # the group's timeout is two minutes
        assert errors[3].text == "None"


def call_differently(rank: int, world_size: int) -> Raised:
    ddp = model()
    if rank == ABSENT:
        return raised(zcomm.ZeroOptimizer, ddp, optim.SGD, lr=0.1)
    return raised(zcomm.compress, ddp)


def test_different_calls_are_named_on_every_rank(three_ranks: World) -> None:
    for error in three_ranks.run(call_differently):
        assert error.is_value_error
        each = "rank 0: compress; rank 1: ZeroOptimizer; rank 2: compress"
        assert f"expected the same call on all ranks, got {each}" in error.text


def keys_of_calls(rank: int, world_size: int) -> list[int]:
    """How many keys the store has after each of some calls."""
    ddp, found = model(), []
    for _ in range(4):
        zcomm.compress(DistributedDataParallel(ddp.module)).close()
        dist.barrier()
        found.append(c10d.default_store().num_keys())
        dist.barrier()
    return found


def test_calls_leave_nothing_in_the_store_for_long(three_ranks: World) -> None:
    for found in three_ranks.run(keys_of_calls):
        assert {later - former for former, later in pairwise(found)} == {0}


def test_calls_over_gloo_leave_the_addresses_of_its_groups() -> None:
    """Two groups are new with each call: their addresses stay, as torch has it."""
    for found in run_ranks(3, keys_of_calls, env=OVER_GLOO):
        assert {later - former for former, later in pairwise(found)} == {2 * 3}


def meet_in_subgroups(rank: int, world_size: int) -> list[Any]:
    """Groups that share ranks, one of which has had a call that failed."""
    timeout = timedelta(seconds=TIMEOUT_S)
    groups = [dist.new_group(ranks, timeout=timeout) for ranks in ([0, 1], [1, 2], [0, 2])]
    mine = [group for group in groups if dist.get_rank(group) >= 0]
    found: list[Any] = []
    if rank != 1:
        group = groups[0] if rank == 0 else groups[1]
        found.append(raised(zcomm.all_reduce, torch.ones(100), group=group).text)
    dist.barrier()
    for group in mine:
        x = torch.full((100,), float(rank))
        zcomm.all_reduce(x, "none", group=group)
        found.append(x[0].item())
    return found


def test_subgroups_count_their_own_calls(three_ranks: World) -> None:
    (first, *of_0), of_1, (second, *of_2) = three_ranks.run(meet_in_subgroups)
    # Ranks of the whole world, not of the group.
    assert first.startswith("rank 0: all_reduce: rank 1 (it")
    assert second.startswith("rank 2: all_reduce: rank 1 (it")
    assert (of_0, of_1, of_2) == ([0.5, 1.0], [0.5, 1.5], [1.5, 1.0])
