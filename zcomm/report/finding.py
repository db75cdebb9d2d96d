"""The result of a check, and how it is printed."""

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

OK, NOTE, PROBLEM = "ok", "note", "problem"
_STATE_WIDTH, _NAME_WIDTH = 9, 15
_WIDEST, _NARROWEST = 100, 40


@dataclass(frozen=True)
class Finding:
    """`lines` are for people, `details` for programs. A problem has a remedy."""

    state: str
    lines: list[str]
    remedy: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """For JSON."""
        return {"state": self.state, "text": "\n".join(self.lines), **self.details}


def guarded(check: Callable[[], Finding]) -> Finding:
    """Reports a check that raises as a problem, so that the next one can run."""
    try:
        return check()
    except Exception as error:
        what = reason(f"{type(error).__name__}: {error}")
        remedy = f"Find out why the check failed ({what}). If it is a bug in zcomm, report it."
        return Finding(PROBLEM, [f"the check failed: {what}"], remedy, {"error": str(error)})


def reason(text: str) -> str:
    """The first line that is not blank."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


def show(name: str, finding: Finding) -> str:
    """State, name and text, wrapped to fit the terminal."""
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
    # Break a path or a command only if it is longer than a line.
    indent = " " * hanging
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def say(text: str) -> None:
    """Prints characters that the terminal's encoding lacks as escapes."""
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
