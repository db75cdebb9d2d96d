"""Settings that every test shares."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import hypothesis
import pytest
import torch

import zcomm

# The same examples on every run. No deadline: machines are slow, and pytest-timeout ends a hang.
hypothesis.settings.register_profile("zcomm", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("zcomm")

# Keeps torch's libraries in memory, for the ranks too: a machine that drops its page cache under
# load would read them from disk for every rank. Does nothing where it is not allowed.
ctypes.CDLL(None).mlockall(1)  # MCL_CURRENT


def pytest_report_header() -> str:
    return f"zcomm {zcomm.__version__} from {zcomm.__file__}, torch {torch.__version__}"


@pytest.fixture(autouse=True)
def torch_settings() -> Iterator[None]:
    """Restores process-wide settings of torch after each test."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_flush_denormal(False)
