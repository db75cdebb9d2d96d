"""The store through which the ranks met, asked with a deadline.

A store whose host is stopped or cut off never answers, no matter which timeout it was given. So a
thread of its own asks each question, and the caller stops waiting for that thread when it wants to.
"""

import atexit
import os
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

from zcomm.torch_private import c10d

# How long the process waits at its end for a question under way.
_EXIT_S = 1.0
_open: "weakref.WeakSet[Answer]" = weakref.WeakSet()


class StoreError(RuntimeError):
    """The store failed, or does not answer. The message says where it is and who keeps it."""


class Answer:
    """What the store says to one question, once it does."""

    def __init__(self, question: Callable[[], Any]) -> None:
        self._question = question
        self._given = threading.Event()
        self._value: Any = None
        self._error: Exception | None = None
        _open.add(self)
        threading.Thread(target=self._ask, name="zcomm-store", daemon=True).start()

    def _ask(self) -> None:
        try:
            self._value = self._question()
        except Exception as error:
            self._error = error
        self._given.set()

    def ready(self) -> bool:
        return self._given.is_set()

    def value(self, timeout_s: float) -> Any:
        """The answer; raises StoreError if there is none by then."""
        if not self._given.wait(max(0.0, timeout_s)):
            raise StoreError(f"{keeper()} does not answer")
        if isinstance(self._error, (RuntimeError, OSError)):  # c10d's errors are RuntimeErrors
            raise StoreError(f"{keeper()} failed: {in_short(self._error)}") from self._error
        if self._error is not None:
            raise self._error
        return self._value

    def join(self, timeout_s: float) -> None:
        self._given.wait(timeout_s)


class Store:
    """A part of the default store with its own prefix."""

    def __init__(self, prefix: str) -> None:
        self.inner = c10d.PrefixStore(f"zcomm/{prefix}", c10d.default_store())

    def ask(self, question: Callable[[Any], Any]) -> Answer:
        """Starts a question: a function of torch's store."""
        return Answer(lambda: question(self.inner))

    def answer(self, question: Callable[[Any], Any], timeout_s: float) -> Any:
        return self.ask(question).value(timeout_s)


def keeper() -> str:
    """Who keeps the store, as an error names it."""
    address = c10d.store_address()
    if address is None:
        return "the store"
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"the store, which {'torchrun' if by_agent else 'rank 0'} keeps at {address},"


def in_short(error: BaseException) -> str:
    """What an error of c10d says first: without its source line, advice and C++ stack."""
    text = re.sub(r"^(\[[^\]]*:\d+\] )+", "", str(error).strip())
    return re.split(r"\. |\n", text)[0] or type(error).__name__


@atexit.register
def _let_questions_end() -> None:
    """A thread that returns from native code while the interpreter shuts down would abort."""
    for answer in list(_open):
        answer.join(_EXIT_S)
