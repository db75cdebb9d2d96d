"""Failure notes: which rank failed.

gloo says that a connection closed or that time ran out, not who is at fault. So a rank that fails
leaves a note in the store. A rank without a note has died, is stopped, or is busy elsewhere.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic, sleep
from typing import Any

from zcomm.transport.store import Answer, Store, StoreError, in_short

_POLL_S = 0.05
_GAVE_UP = "gave up in"


class CommunicationError(RuntimeError):
    """A peer died, stalled or failed. The message says where, and which one if that is known."""


class FailureNotes:
    """The notes of the ranks of one transport. Nothing here waits longer than `grace_s`.

    Ranks are global ones, as users know them, whatever the group.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], grace_s: float) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._grace_s = grace_s
        self._reported = False
        self._looking: Answer | None = None

    def report(self, text: str) -> None:
        """Tells the others that this rank failed, or gave up because another did; once."""
        if not self._reported:
            self._reported = True
            self._store.answer(lambda store: self._leave(store, text), self._grace_s)

    def _leave(self, store: Any, text: str) -> None:
        store.set(f"failed/{self._rank}", text)
        store.set("failed", "")

    def peer_failed(self) -> bool:
        """Whether a peer has left a note, as of the last answer. It never waits for the store: if
        that is gone, the deadline of the collective decides."""
        if self._looking is not None and not self._looking.ready():
            return False
        found = False
        if self._looking is not None:
            with suppress(StoreError):
                found = bool(self._looking.value(0))
        self._looking = self._store.ask(lambda store: store.check(["failed"]))
        return found

    def failure(
        self, what: str, error: BaseException | None, waited_s: float, dead: int | None = None
    ) -> CommunicationError:
        """The error of a collective that failed. The culprit comes first, gloo's words last.

        If it is known which rank is `dead`, nobody is asked.
        """
        started = monotonic()
        me = f"rank {self._rank}"
        where = what + (f" [{in_short(error)}]" if error else "")
        if dead is not None:
            with suppress(StoreError):  # the dead rank may have kept the store
                self.report(f"{_GAVE_UP} {what}")
            return CommunicationError(f"{me}: rank {dead} died in {where}")
        try:
            self.report(f"{_GAVE_UP} {what}")
            found, silent = self._notes()
        except StoreError as lost:
            return CommunicationError(
                f"{me}: {lost}: its process died or stopped, or its host cannot be reached; in "
                f"{where}"
            )
        failed = {r: note for r, note in found.items() if not note.startswith(_GAVE_UP)}
        if failed:
            notes = "; ".join(f"rank {r}: {note}" for r, note in failed.items())
            return CommunicationError(f"{me}: {_names(failed)} failed in {where}: {notes}")
        if silent:
            waited = f"{waited_s + monotonic() - started:.0f}"
            return CommunicationError(
                f"{me}: {_names(silent)} died or stopped (no answer for {waited} s) in {where}"
            )
        return CommunicationError(f"{me}: all ranks are alive, but this did not finish: {where}")

    def disagreement(self, signature: str) -> ValueError:
        """The error of ranks whose signatures differ, with every signature it can get."""
        signatures: dict[int, str] = {}
        with suppress(StoreError):
            self.report(signature)
            signatures, _ = self._notes()
        signatures[self._rank] = signature
        values = "; ".join(f"rank {r}: {s}" for r, s in sorted(signatures.items()))
        return ValueError(f"rank {self._rank}: expected the same call on all ranks, got {values}")

    def _notes(self) -> tuple[dict[int, str], list[int]]:
        """What the other ranks reported, and the ranks silent throughout the grace period.

        A rank that has raised may end and take the store along. What was read before counts.
        """
        silent = [r for r in self._ranks if r != self._rank]
        found: dict[int, str] = {}
        deadline = monotonic() + self._grace_s
        while silent and (left := deadline - monotonic()) > 0:
            try:
                found |= self._store.answer(partial(_read, ranks=silent), left)
            except StoreError:
                if not found:
                    raise
                break
            silent = [r for r in silent if r not in found]
            if silent:
                sleep(_POLL_S)
        return found, silent


def _read(store: Any, ranks: list[int]) -> dict[int, str]:
    """The notes of those ranks that have left one."""
    there = [r for r in ranks if store.check([f"failed/{r}"])]
    return {r: store.get(f"failed/{r}").decode() for r in there}


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(f"rank {r}" for r in ranks)
