"""Plots as SVG text: lines on linear or logarithmic axes, and bars."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zcomm.report import svg
from zcomm.report.svg import GRID, INK, MUTED, Scale

WIDTH, HEIGHT = 400, 320
MARGIN = 14
# The first are Okabe and Ito's, which color-blind readers can tell apart; those for dark pages are
# lighter. The ninth series reuses the first color, dashed.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#5b5b5b", "#e69f00", "#8c5a2b", "#7a4fbf")
ON_DARK = ("#56b4e9", "#f08a3c", "#2fc79a", "#e39ac4", "#b8bec6", "#f0c040", "#c99a6b", "#b394f0")
DASHES = ("none", "5 3", "2 2")
MOST_DOTS = 40  # lines with more points have no dots
STITCH = 12  # length of the alternating colors where lines overlap

Show = Callable[[float], str]
Area = tuple[float, float, float, float]  # left, right, top, bottom


@dataclass(frozen=True)
class Series:
    """The points of one line. Those not finite or without a logarithm are left out."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    log: bool

    def scale(self, start: float, end: float) -> Scale:
        return svg.scale(self.low, self.high, start, end, math.log10 if self.log else float)

    def ticks(self) -> list[float]:
        choose = log_ticks if self.log else even_ticks
        return [tick for tick in choose(self.low, self.high) if self.low <= tick <= self.high]


def number(value: float) -> str:
    """Short, for ticks: 0.25, 1500, 20k, 3M."""
    if not math.isfinite(value):
        return str(value)
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:.4g}"


def lines(
    series: Sequence[Series], *, title: str, x_label: str, y_label: str, log: bool = False
) -> str:
    """One line for each series; `log` makes both axes logarithmic."""
    shown = [finite(one, log) for one in series]
    xs = [x for one in shown for x in one.xs]
    ys = [y for one in shown for y in one.ys]
    x_axis, y_axis = axis(xs, log), axis(ys, log, room=0.04)
    key, top = legend([one.name for one in series])
    left = MARGIN + max(svg.text_width(number(tick), 11) for tick in y_axis.ticks()) + 6
    right, top, bottom = WIDTH - MARGIN, top + 26, HEIGHT - 46
    x, y = x_axis.scale(left, right), y_axis.scale(bottom, top)
    parts = [
        heading(title),
        key,
        *frame(x_axis, x, y_axis, y, (left, right, top, bottom), x_label, y_label),
        *(draw(i, one, x, y) for i, one in enumerate(shown)),
        *(stitches(i, len(shown), one, x, y) for i, one in enumerate(shown)),
    ]
    if not xs:
        middle = svg.text((left + right) / 2, (top + bottom) / 2, "no values", anchor="middle")
        parts.append(svg.group("muted", MUTED, [middle]))
    about = f"{y_label} over {x_label}. " + "; ".join(map(summary, shown))
    return svg.document(WIDTH, HEIGHT, parts, name=title, about=about)


def bars(
    names: Sequence[str], values: Sequence[float], *, title: str, label: str, show: Show = number
) -> str:
    """A horizontal bar for each value, with the value at its end, in the colors of `lines`."""
    shown = [value if math.isfinite(value) and value > 0 else 0.0 for value in values]
    says = [show(value) for value in values]
    left = MARGIN
    room = max((svg.text_width(words) for words in says), default=0) + 8
    x = svg.scale(0, max(shown, default=0) or 1, left, WIDTH - MARGIN - room)
    height = max(HEIGHT, 64 + 40 * len(names))
    pitch = min(60, (height - 64) / max(1, len(names)))
    parts = [heading(title), svg.group("muted", MUTED, [svg.text(left, 44, label, size=11)])]
    for i, (name, value, words) in enumerate(zip(names, shown, says, strict=True)):
        top = 56 + i * pitch
        thick = pitch - 28
        parts += [
            svg.group("ink", INK, [svg.text(left, top + 14, name)]),
            series_group(i, [svg.rectangle(left, top + 19, x(value) - left, thick, round=2)]),
            svg.group("ink", INK, [svg.text(x(value) + 6, top + 23 + thick / 2, words)]),
        ]
    about = label + ": " + "; ".join(f"{name} {words}" for name, words in zip(names, says))
    return svg.document(WIDTH, height, parts, name=title, about=about)


def side_by_side(plots: Sequence[str], *, name: str) -> str:
    """Several plots in one picture, on a white background."""
    gap = 24
    width = len(plots) * (WIDTH + gap) + gap
    parts = [svg.rectangle(0, 0, width, HEIGHT + gap, svg.PAPER, round=8)]
    parts += [svg.moved(gap + i * (WIDTH + gap), gap / 2, [one]) for i, one in enumerate(plots)]
    about = f"{len(plots)} plots side by side"
    return svg.document(width, HEIGHT + gap, parts, name=name, about=about)


def finite(one: Series, log: bool) -> Series:
    def kept(value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not log)

    good = [(x, y) for x, y in zip(one.xs, one.ys, strict=True) if kept(x) and kept(y)]
    return Series(one.name, [x for x, _ in good], [y for _, y in good])


def axis(values: Sequence[float], log: bool, room: float = 0) -> Axis:
    """From the smallest to the largest value, and a share `room` more at both ends."""
    low, high = min(values, default=1.0), max(values, default=10.0)
    if math.isclose(low, high, rel_tol=1e-6):  # all ticks between them would read the same
        half = abs(low) / 2 or 0.5
        low, high = (low / 2, high * 2) if log else (low - half, high + half)
    elif log:
        ratio = (high / low) ** room
        low, high = low / ratio, high * ratio
    else:
        low, high = low - room * (high - low), high + room * (high - low)
    return Axis(low, high, log)


def even_ticks(low: float, high: float) -> list[float]:
    """Four to eight multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.7 * rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [float(f"{i * step:.9g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 between them if few fit; even ticks for short ranges."""
    if high / low < 5:
        return even_ticks(low, high)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    between = (1, 2, 5) if math.log10(high / low) <= 2.5 else (1,)
    every = max(1, round((last - first) / 6))
    return [m * 10.0**power for power in range(first, last + 1, every) for m in between]


def heading(title: str) -> str:
    return svg.group("ink", INK, [svg.text(MARGIN, 22, title, weight="600", size=14)])


def legend(names: Sequence[str]) -> tuple[str, float]:
    """The legend, in as many rows as it needs, and where it ends."""
    parts, x, y = [], float(MARGIN), 44.0
    for i, name in enumerate(names):
        width = 22 + svg.text_width(name)
        if x > MARGIN and x + width > WIDTH - MARGIN:
            x, y = float(MARGIN), y + 17
        sample = svg.polyline([(x, y - 4), (x + 16, y - 4)], width=2.5, dashes=dashes(i))
        parts += [series_group(i, [sample]), svg.group("ink", INK, [svg.text(x + 21, y, name)])]
        x += width + 10
    return "".join(parts), y


def frame(
    x_axis: Axis, x: Scale, y_axis: Axis, y: Scale, area: Area, x_label: str, y_label: str
) -> list[str]:
    """Grid, ticks and labels."""
    left, right, top, bottom = area
    grid = [svg.line(left, y(tick), right, y(tick)) for tick in y_axis.ticks()]
    words = [
        svg.text(left - 6, y(tick) + 4, number(tick), anchor="end", size=11)
        for tick in y_axis.ticks()
    ]
    end = -math.inf
    for tick in x_axis.ticks():
        half = svg.text_width(number(tick), 11) / 2
        at = min(x(tick), right + MARGIN - half)
        grid.append(svg.line(x(tick), bottom, x(tick), bottom + 4))
        if at - half > end + 4:  # otherwise it would touch the previous one
            words.append(svg.text(at, bottom + 17, number(tick), anchor="middle", size=11))
            end = at + half
    grid.append(svg.line(left, bottom, right, bottom))
    words.append(svg.text(MARGIN, top - 9, y_label, size=11))
    words.append(svg.text((left + right) / 2, bottom + 35, x_label, anchor="middle", size=11))
    return [svg.group("grid", GRID, grid), svg.group("muted", MUTED, words)]


def draw(index: int, one: Series, x: Scale, y: Scale) -> str:
    points = [(x(a), y(b)) for a, b in zip(one.xs, one.ys)]
    parts = [svg.polyline(points, width=2, dashes=dashes(index))]
    if len(points) <= MOST_DOTS:
        says = [f"{one.name}: {number(b)} at {number(a)}" for a, b in zip(one.xs, one.ys)]
        parts += [svg.dot(*at, radius=3, says=words) for at, words in zip(points, says)]
    return series_group(index, parts)


def stitches(index: int, count: int, one: Series, x: Scale, y: Scale) -> str:
    """Redraws its share of a long line: where lines overlap, only the last would be visible."""
    if len(one.xs) <= MOST_DOTS or dashes(index) != "none":
        return ""
    points = [(x(a), y(b)) for a, b in zip(one.xs, one.ys)]
    share = f"{STITCH} {STITCH * (count - 1)}"
    line = svg.polyline(points, width=2, dashes=share, dashes_from=-index * STITCH)
    return series_group(index, [line])


def series_group(index: int, parts: Sequence[str]) -> str:
    which = index % len(COLORS)
    return svg.group(f"series-{which}", COLORS[which], parts)


def dashes(index: int) -> str:
    return DASHES[index // len(COLORS) % len(DASHES)]


def summary(one: Series) -> str:
    if not one.ys:
        return f"{one.name}: no values"
    return f"{one.name}: from {number(one.ys[0])} to {number(one.ys[-1])}"
