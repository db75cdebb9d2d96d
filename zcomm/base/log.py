"""What zcomm says: through the logger "zcomm", or to stdout if logging is not set up."""

import logging


def say(line: str) -> None:
    logger = logging.getLogger("zcomm")
    if logger.hasHandlers():
        logger.info(line)
    else:
        print(line, flush=True)
