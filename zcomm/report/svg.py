"""The shapes of plots, as SVG text.

Pictures need no style sheet: every color is an attribute, so that they look the same in a page, in
an <img> and in an editor. A page's style sheet can override the colors of a `group` by its class.
"""

import math
from collections.abc import Callable, Iterable
from html import escape

INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#d8dee4", "#ffffff"
INHERITED = "currentColor"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

Scale = Callable[[float], float]


def scale(
    low: float, high: float, start: float, end: float, shape: Scale = lambda value: value
) -> Scale:
    """Maps low to start and high to end, evenly after `shape`, such as a logarithm."""
    first, span = shape(low), shape(high) - shape(low)
    return lambda value: start + (end - start) * (shape(value) - first) / span


def document(width: float, height: float, parts: Iterable[str], *, name: str, about: str) -> str:
    """A whole picture. `name` and `about` are for screen readers."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:g}" '
            f'height="{height:g}" viewBox="0 0 {width:g} {height:g}" '
            f'font-family="{FONT}" font-size="12">',
            f"<title>{escape(name)}</title>",
            f"<desc>{escape(about)}</desc>",
            *parts,
            "</svg>\n",
        ]
    )


def group(kind: str, color: str, parts: Iterable[str]) -> str:
    """Shapes of one color; style sheets find them by class."""
    return f'<g class="{kind}" color="{color}">{"".join(parts)}</g>'


def moved(x: float, y: float, parts: Iterable[str]) -> str:
    return f'<g transform="translate({x:g} {y:g})">{"".join(parts)}</g>'


def line(
    x1: float, y1: float, x2: float, y2: float, color: str = INHERITED, width: float = 1
) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-width="{width:g}"/>'


def dot(x: float, y: float, color: str = INHERITED, *, radius: float = 3.5, says: str = "") -> str:
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"'
    inside = f"<title>{escape(says)}</title>" if says else ""
    return f'<circle {place} fill="{color}">{inside}</circle>'


def rectangle(
    x: float, y: float, width: float, height: float, color: str = INHERITED, *, round: float = 0
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{round:g}"'
    return f'<rect {place} fill="{color}"/>'


def polyline(
    points: Iterable[tuple[float, float]],
    color: str = INHERITED,
    width: float = 1.5,
    dashes: str = "none",
    dashes_from: float = 0,
) -> str:
    """A line through the points, interrupted where a point is not finite."""
    pieces: list[list[str]] = [[]]
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            pieces[-1].append(f"{x:.1f} {y:.1f}")
        elif pieces[-1]:
            pieces.append([])
    path = " ".join(f"M{' L'.join(piece)}" for piece in pieces if piece)
    style = f'stroke-width="{width:g}" stroke-linejoin="round"'
    if dashes != "none":
        style += f' stroke-dasharray="{dashes}" stroke-dashoffset="{dashes_from:g}"'
    return f'<path d="{path}" fill="none" stroke="{color}" {style}/>'


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    color: str = INHERITED,
    weight: str = "normal",
    size: float = 12,
) -> str:
    style = f'text-anchor="{anchor}" fill="{color}" font-weight="{weight}" font-size="{size:g}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def text_width(words: str, size: float = 12) -> float:
    """An estimate for any font, rather too wide than too narrow."""
    return 0.58 * size * len(words)
