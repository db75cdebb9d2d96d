"""Two ranks that all tests of DDP share: each needs seconds to import torch's DDP.

A test module gets them with `pytest_plugins = ["ddp_ranks"]`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import World


@pytest.fixture(scope="session")
def pair() -> Iterator[World]:
    with World(2) as world:
        yield world
