"""Two ranks for all the tests of DDP: each takes seconds to import what DDP needs.

A test module has them with `pytest_plugins = ["ddp_ranks"]`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import World


@pytest.fixture(scope="session")
def pair() -> Iterator[World]:
    with World(2) as world:
        yield world
