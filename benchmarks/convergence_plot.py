"""The figure of convergence.py, as a self-contained SVG."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zcomm.report import svg
from zcomm.report.svg import dot, line, polyline, scale, text

WIDTH, HEIGHT = 900, 400
TOP, BOTTOM = 50, 350
LEFT_PANEL = (100, 420)
RIGHT_PANEL = (510, 790)
# The Okabe-Ito colors, which color-blind readers can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000")
TICKS = (-1, 0, 0.5, 1, 2, 4, 8, 16, 32)
SMOOTHED_STEPS = 20


@dataclass(frozen=True)
class Dots:
    """One codec with one kind of feedback: its difference from fp32 in %, for each seed."""

    codec: str
    feedback: str
    differences: Sequence[float]


def draw(rows: Sequence[Dots], curves: dict[str, list[float]]) -> str:
    """Left: each codec and feedback's difference from fp32. Right: the loss by step."""
    paper = svg.rectangle(0, 0, WIDTH, HEIGHT, svg.PAPER)
    inked = svg.group("ink", svg.INK, [*draw_differences(rows), *draw_curves(curves)])
    about = "Left, how far each codec and feedback is from fp32; right, the loss over the steps."
    return svg.document(WIDTH, HEIGHT, [paper, inked], name="Convergence", about=about)


def draw_differences(rows: Sequence[Dots]) -> Iterable[str]:
    codecs = list(dict.fromkeys(row.codec for row in rows))
    feedbacks = list(dict.fromkeys(row.feedback for row in rows))
    values = [value for row in rows for value in row.differences if math.isfinite(value)]
    low, high = min(0.0, *values), max(1.0, *values)
    x = scale(low, high, *LEFT_PANEL, shape=signed_log)
    pitch = (BOTTOM - TOP) / max(1, len(codecs))
    yield text(LEFT_PANEL[0], 20, "Held-out loss against fp32 DDP, %, by feedback", weight="bold")
    for tick in TICKS:
        if low <= tick <= high:
            yield line(x(tick), TOP, x(tick), BOTTOM, "#999" if tick == 0 else "#ddd")
            yield text(x(tick), BOTTOM + 16, f"{tick:g}", anchor="middle")
    note = "logarithmic beyond 1; dot: mean, line: range of the seeds"
    yield text(LEFT_PANEL[0], BOTTOM + 36, note)
    for i, codec in enumerate(codecs):
        yield text(LEFT_PANEL[0] - 10, TOP + (i + 0.5) * pitch + 4, codec, anchor="end")
    for row in rows:
        which = feedbacks.index(row.feedback)
        y = TOP + (codecs.index(row.codec) + (which + 1) / (len(feedbacks) + 1)) * pitch
        mean = statistics.fmean(row.differences)
        if math.isfinite(mean):  # if it diverged, there is no dot
            ends = x(min(row.differences)), x(max(row.differences))
            yield line(ends[0], y, ends[1], y, COLORS[which], 1.5)
            yield dot(x(mean), y, COLORS[which])
    for which, name in enumerate(feedbacks):
        at = LEFT_PANEL[0] + 110 * which
        yield dot(at + 4, 36, COLORS[which])
        yield text(at + 12, 40, name)


def draw_curves(curves: dict[str, list[float]]) -> Iterable[str]:
    smooth = {name: smoothed(curve) for name, curve in curves.items()}
    ends = [curve[-1] for curve in smooth.values()]
    low, high = 0.97 * min(ends), 3.5
    steps = max(len(curve) for curve in curves.values())
    x = scale(0, steps, *RIGHT_PANEL)
    y = scale(low, high, BOTTOM, TOP)
    yield text(RIGHT_PANEL[0], 20, "Training loss over the steps", weight="bold")
    for tick in (2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5):
        if low <= tick:
            yield line(RIGHT_PANEL[0], y(tick), RIGHT_PANEL[1], y(tick), "#ddd")
            yield text(RIGHT_PANEL[0] - 6, y(tick) + 4, f"{tick:g}", anchor="end")
    for step in range(0, steps + 1, 50 * math.ceil(steps / 400)):
        yield text(x(step), BOTTOM + 16, str(step), anchor="middle")
    yield text(RIGHT_PANEL[0], BOTTOM + 36, f"mean of the seeds and of {SMOOTHED_STEPS} steps")
    label_ys = apart([y(end) for end in ends], 15)
    for (name, curve), label_y, color in zip(smooth.items(), label_ys, itertools.cycle(COLORS)):
        first = SMOOTHED_STEPS / 2  # the middle of the steps averaged in a point
        points = [(x(i + first), y(loss)) for i, loss in enumerate(curve) if loss <= high]
        yield polyline(points, color)
        yield text(RIGHT_PANEL[1] + 6, label_y + 4, name, color=color)


def smoothed(curve: Sequence[float]) -> list[float]:
    sums = [0.0, *itertools.accumulate(curve)]
    return [(b - a) / SMOOTHED_STEPS for a, b in zip(sums, sums[SMOOTHED_STEPS:])]


def apart(positions: Sequence[float], gap: float) -> list[float]:
    """The positions, moved up just far enough that labels do not overlap."""
    placed = list(positions)
    order = sorted(range(len(placed)), key=lambda i: -placed[i])
    for lower, upper in zip(order, order[1:]):
        placed[upper] = min(placed[upper], placed[lower] - gap)
    return placed


def signed_log(value: float) -> float:
    """Nearly linear up to 1%, logarithmic beyond."""
    return math.copysign(math.log1p(abs(value)), value)
