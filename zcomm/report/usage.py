"""The command line: help text, wrapped lines, and errors that are the user's to fix."""

import argparse
import textwrap
from pathlib import Path


class UsageError(ValueError):
    """The user asked for something impossible. The message says expected, got, remedy."""


class Paragraphs(argparse.RawDescriptionHelpFormatter):
    """Wraps each paragraph of a module's docstring, but leaves indented ones: they are commands.

    Adds the default of an option that has one value, unless its help speaks of the default.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip().split("\n\n")
        return "\n\n".join(p if p.startswith(" ") else textwrap.fill(p, width) for p in parts)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        shown = type(default) in (str, int, float) and default != argparse.SUPPRESS
        return f"{text} (default: %(default)s)" if shown and "default" not in text else text


def wrapped(text: str) -> str:
    """Fits any terminal; names and paths stay in one piece."""
    return textwrap.fill(text, 79, break_long_words=False, break_on_hyphens=False)


def expect_range(option: str, value: float, least: float, most: float) -> None:
    """Refuses a number out of range; NaN is out of every one."""
    if not least <= value <= most:
        raise UsageError(f"expected {option} from {least:,} to {most:,}, got {value}")


def expect_writable(path: Path) -> None:
    """Call it before the work starts, not when the result is ready."""
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"expected a file in a folder that exists, got {path}")
    existed = path.exists()
    try:
        path.open("a").close()  # permissions alone do not tell: root may write to /proc
        if not existed:
            path.unlink(missing_ok=True)  # another rank may have tried, too
    except OSError as error:
        raise UsageError(
            f"expected a file that can be written, got {path} ({error.strerror}); use another "
            "folder"
        ) from error
