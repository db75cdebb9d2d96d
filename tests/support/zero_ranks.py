"""Four ranks for all the tests of ZeroOptimizer that want more than two.

A test module has them with `pytest_plugins = ["zero_ranks"]`; tests of three use among().
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import World


@pytest.fixture(scope="session")
def quartet() -> Iterator[World]:
    with World(4) as world:
        yield world
