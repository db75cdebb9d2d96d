"""Reports as one HTML file, without external scripts, fonts or images.

`page` returns the document. Its parts come from here and from plot.py; all other arguments are
plain text and are escaped.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from zcomm.report import plot, svg

# On light and on dark screens.
COLORS = {
    "paper": ("#f6f8fa", "#0d1117"),
    "card": (svg.PAPER, "#161b22"),
    "ink": (svg.INK, "#e6edf3"),
    "muted": (svg.MUTED, "#9198a1"),
    "grid": (svg.GRID, "#30363d"),
    "accent": ("#00734f", "#2fc79a"),
    "marked": ("#e8f6f1", "#12261e"),
}
STYLE = Path(__file__).with_name("page.css")


def page(title: str, about: Mapping[str, object], parts: Sequence[str]) -> str:
    """The document: the parts, then `about`, which says where and how it was measured."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            # Without an icon, browsers would request one from a server.
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>{style()}</style>",
            "</head>",
            "<body>",
            "<main>",
            f"<h1>{escape(title)}</h1>",
            *parts,
            section("Where and how", "", description(about)),
            "</main>",
            "</body>",
            "</html>\n",
        ]
    )


def section(heading: str, text: str, *bodies: str) -> str:
    """A heading, paragraphs (separated by blank lines), then plots and tables side by side."""
    paragraphs = [f"<p>{escape(one)}</p>" for one in text.split("\n\n") if one.strip()]
    inside = [framed(body) for body in bodies]
    shown = [f'<div class="bodies">{"".join(inside)}</div>'] if inside else []
    return "\n".join(
        ["<section>", f"<h2>{escape(heading)}</h2>", *paragraphs, *shown, "</section>"]
    )


def table(
    headings: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1, marked: int = -1
) -> str:
    """The first `left` columns are words, the others numbers; `marked` is highlighted."""
    head = "".join(cell("th", name, i < left) for i, name in enumerate(headings))
    body = []
    for number, row in enumerate(rows):
        cells = "".join(cell("td", value, i < left) for i, value in enumerate(row))
        body.append(f'<tr class="marked">{cells}</tr>' if number == marked else f"<tr>{cells}</tr>")
    inside = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="card wide"><table>{inside}</table></div>'


def tiles(facts: Sequence[tuple[str, str]]) -> str:
    """The headline figures of a report, each with what it means."""
    each = [
        f'<div class="tile"><b>{escape(figure)}</b><span>{escape(words)}</span></div>'
        for figure, words in facts
    ]
    return f'<div class="wide tiles">{"".join(each)}</div>'


def description(facts: Mapping[str, object]) -> str:
    each = [
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items()
    ]
    return f'<div class="card wide"><dl>{"".join(each)}</dl></div>'


def cell(tag: str, value: object, words: bool) -> str:
    kind = ' class="words"' if words else ""
    return f"<{tag}{kind}>{escape(str(value))}</{tag}>"


def framed(body: str) -> str:
    """Frames a plot; tables and tiles have their own frames."""
    return f'<figure class="card">{body}</figure>' if body.startswith("<svg") else body


def style() -> str:
    light, dark = (
        " ".join(f"--{name}: {pair[i]};" for name, pair in COLORS.items()) for i in (0, 1)
    )
    return "\n".join(
        [
            f":root {{ {light} }}",
            STYLE.read_text().replace("FONT", svg.FONT),
            "@media screen and (prefers-color-scheme: dark) {",
            f":root {{ {dark} }}",
            *(f".series-{i} {{ color: {color}; }}" for i, color in enumerate(plot.ON_DARK)),
            "}",
        ]
    )
