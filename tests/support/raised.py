"""Errors of ranks, in a form that another process can look at."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Raised:
    """An error as another process can look at it."""

    def __init__(self, error: BaseException | None, seconds: float) -> None:
        self.type = type(error).__name__
        self.is_value_error = isinstance(error, ValueError)
        self.text, self.seconds = str(error), seconds


def raised(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Raised:
    started = time.monotonic()
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return Raised(error, time.monotonic() - started)
    return Raised(None, time.monotonic() - started)
