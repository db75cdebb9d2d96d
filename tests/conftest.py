"""Settings that every test shares."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import hypothesis
import pytest
import torch

import zcomm

# The same examples on every run; a slow machine is no failure (pytest-timeout ends a hang).
hypothesis.settings.register_profile("zcomm", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("zcomm")

# Keeps torch's libraries in memory, for the ranks too: on a machine that drops its page cache under
# load, ranks would read them from the disk again and again. Where it is not allowed: no harm.
ctypes.CDLL(None).mlockall(1)  # MCL_CURRENT


def pytest_report_header() -> str:
    return f"zcomm {zcomm.__version__} from {zcomm.__file__}, torch {torch.__version__}"


@pytest.fixture(autouse=True)
def torch_settings() -> Iterator[None]:
    """Process-wide settings that a test changes do not leak into the next one."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_flush_denormal(False)
