"""Progress of trainings that take turns: redrawn on a terminal, plain lines otherwise."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from zcomm.report.table import Table

PLAIN_EVERY_S = 5.0
UP_AND_CLEAR = "\x1b[{}A\x1b[J"
# The terminal colors nearest to the first colors of the plots.
COLORS = (32, 166, 36, 175)
SPEED_WIDTH = 16


@dataclass(frozen=True)
class Standing:
    """Of one variant, over the last few steps."""

    loss: float
    tokens_per_s: float


Standings = Sequence[Standing | None]


class Progress:
    def __init__(self, names: Sequence[str], stream: TextIO) -> None:
        self.names, self.stream = names, stream
        self.start = time.monotonic()
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.colored = self.live and "NO_COLOR" not in os.environ
        self.drawn_lines = 0
        self.last_plain, self.last_done = -PLAIN_EVERY_S, 0
        self.table = Table(["step", *names], [9, *[13] * len(names)])

    def show(self, done: int, steps: int | None, standings: Standings) -> None:
        """`done`: steps that all variants have done. `steps` is None while not yet known."""
        if self.live:
            self.draw(done, steps, standings)
        elif done > self.last_done and (
            done == steps or time.monotonic() > self.last_plain + PLAIN_EVERY_S
        ):
            self.print_line(done, steps, standings)
            self.last_done = done

    def print_line(self, done: int, steps: int | None, standings: Standings) -> None:
        if not self.last_done:
            self.write("Loss and tokens/s, mean of the last few steps:\n" + self.table.heading())
        self.last_plain = time.monotonic()
        cells = [f"{one.loss:.3f} {one.tokens_per_s:5.0f}/s" for one in standings if one]
        self.write(self.table.row([f"{done}/{steps}" if steps else str(done), *cells]))

    def draw(self, done: int, steps: int | None, standings: Standings) -> None:
        width = min(terminal_width(self.stream), 110) - 1
        rows = [self.bar_line(done, steps, width)]
        fastest = max((one.tokens_per_s for one in standings if one), default=1.0)
        for i, one in enumerate(standings):
            rows.append(self.way_line(i, one, fastest, width))
        back = UP_AND_CLEAR.format(self.drawn_lines) if self.drawn_lines else ""
        self.write(back + "\n".join(rows))
        self.drawn_lines = len(rows)

    def bar_line(self, done: int, steps: int | None, width: int) -> str:
        if steps is None:
            return f"step {done}: measuring how many steps fit in the time"[:width]
        elapsed = time.monotonic() - self.start
        left = f"about {elapsed * (steps - done) / done:.0f} s left" if done else ""
        if done == steps:
            left = "testing on held-out text"
        words = f"step {done} of {steps}"
        room = max(0, width - len(words) - len(left) - 4)
        full = round(room * done / steps)
        bar = self.marks("━", "=") * full + self.marks("─", ".") * (room - full)
        return f"{words}  {bar}  {left}"

    def way_line(self, number: int, one: Standing | None, fastest: float, width: int) -> str:
        """The loss, and the speed as a bar and a number."""
        name = self.names[number].ljust(max(map(len, self.names)))
        if one is None:
            return name
        words = f"{name}  loss {one.loss:.3f}"
        speed = f"{one.tokens_per_s:,.0f} tokens/s".rjust(SPEED_WIDTH)
        room = width - len(words) - len(speed) - 2
        if room < 4:
            return (words + speed)[:width]
        full = max(1, round(room * one.tokens_per_s / fastest))
        bar = self.paint(number, self.marks("▇", "#") * full) + " " * (room - full)
        return f"{words}  {bar}{speed}"

    def marks(self, nice: str, plain: str) -> str:
        return nice if (self.stream.encoding or "").lower().startswith("utf") else plain

    def paint(self, number: int, words: str) -> str:
        color = COLORS[number % len(COLORS)]
        return f"\x1b[38;5;{color}m{words}\x1b[0m" if self.colored else words

    def write(self, words: str) -> None:
        self.stream.write(words + "\n")
        self.stream.flush()


def terminal_width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):  # not a terminal, or not a file
        return 80
