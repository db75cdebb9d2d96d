"""What zcomm says: through the logger "zcomm", or directly if logging is not set up."""

import logging
import sys
from typing import TextIO


def say(line: str, file: TextIO | None = None) -> None:
    """What the user has asked for; without logging, to stdout."""
    logger = logging.getLogger("zcomm")
    if logger.hasHandlers():
        logger.info(line)
    else:
        print(line, flush=True, file=file)


def note(line: str) -> None:
    """What nobody has asked for; without logging, to stderr: a program's output stays its own."""
    say(line, sys.stderr)
