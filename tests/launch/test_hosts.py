"""How ranks are spread over emulated hosts; for what hosts do see test_separate_hosts.py."""

from __future__ import annotations

from typing import Any

import pytest

from zcomm.launch import hosts


@pytest.mark.parametrize(
    ("spread", "counts"),
    [
        (None, [4]),
        (1, [4]),
        (2, [2, 2]),
        (4, [1, 1, 1, 1]),
        ((3, 1), [3, 1]),
        ([1, 1, 2], [1, 1, 2]),
    ],
)
def test_ranks_are_spread_evenly_or_as_given(spread: Any, counts: list[int]) -> None:
    assert hosts.ranks_of_hosts(4, spread) == counts


@pytest.mark.parametrize(
    ("spread", "says"),
    [
        (3, "expected a multiple of 3 hosts as ranks, got 4"),
        (0, "expected a multiple of 0 hosts as ranks, got 4"),
        ((3, 2), r"expected hosts that have 4 ranks in all, got \(3, 2\)"),
        ((4, 0), r"expected hosts that have 4 ranks in all, got \(4, 0\)"),
    ],
)
def test_hosts_that_do_not_have_all_ranks_are_refused(spread: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says), hosts.world(4, spread, "1gbit"):
        pass
