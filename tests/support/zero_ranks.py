"""Four ranks that all tests share that need more than two.

A test module gets them with `pytest_plugins = ["zero_ranks"]`; tests that need three use among().
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import World


@pytest.fixture(scope="session")
def quartet() -> Iterator[World]:
    with World(4) as world:
        yield world
