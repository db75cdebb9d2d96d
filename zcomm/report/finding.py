"""What a check of `zcomm doctor` found, and how it reads."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

OK, NOTE, PROBLEM = "ok", "note", "problem"
_STATE_WIDTH, _NAME_WIDTH = 9, 11
_WIDEST, _NARROWEST = 100, 40


@dataclass(frozen=True)
class Finding:
    """`lines` are for people, `details` for programs. A problem has a remedy."""

    state: str
    lines: list[str]
    remedy: str = ""
    details: dict[str, Any] = field(default_factory=dict)


def guarded(check: Callable[[], Finding]) -> Finding:
    """A check that fails by itself is a problem with a reason, and the next one goes on."""
    try:
        return check()
    except Exception as error:
        what = reason(f"{type(error).__name__}: {error}")
        remedy = f"Find out why the check failed ({what}); if it is zcomm's fault, report it."
        return Finding(PROBLEM, [f"the check failed: {what}"], remedy, {"error": str(error)})


def reason(text: str) -> str:
    """The first line that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


def show(name: str, finding: Finding) -> str:
    """A finding as lines that fit the terminal: its state, its name, then text."""
    margin = " " * (_STATE_WIDTH + _NAME_WIDTH)
    wrapped = [part for line in finding.lines for part in _wrap(line, len(margin))]
    head = f"{finding.state:<{_STATE_WIDTH}}{name:<{_NAME_WIDTH}}"
    return "\n".join([head + wrapped[0], *(margin + part for part in wrapped[1:])])


def show_remedies(remedies: list[str]) -> Iterator[str]:
    for number, remedy in enumerate(remedies, 1):
        first, *rest = _wrap(remedy, 4, hanging=0)
        yield f"{number:>2}. {first}"
        yield from (f"    {part}" for part in rest)


def _wrap(line: str, margin: int, hanging: int = 2) -> list[str]:
    columns = shutil.get_terminal_size().columns
    width = min(max(columns, _NARROWEST), _WIDEST) - margin
    # A path or a command is cut only if it is longer than a line.
    return textwrap.wrap(line, width, subsequent_indent=" " * hanging, break_on_hyphens=False) or [
        ""
    ]


def say(text: str) -> None:
    """Prints what the terminal's encoding has; the rest, of names and messages, as escapes."""
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
