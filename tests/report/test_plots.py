"""Plots are correct and readable, and a report is self-contained."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from browser import chromium
from zcomm.report import page as report
from zcomm.report import plot
from zcomm.report.plot import Series

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert('x')</script> & \"quotes\""
LABELS = {"title": "T", "x_label": "step", "y_label": "loss"}


def parsed(picture: str) -> ElementTree.Element:
    return ElementTree.fromstring(picture)


def texts(picture: str) -> list[str]:
    return [node.text or "" for node in parsed(picture).iter(f"{SVG}text")]


def points(picture: str) -> list[list[tuple[float, float]]]:
    """The points of each line, without the legend's samples."""
    paths = [node.attrib["d"] for node in parsed(picture).iter(f"{SVG}path")]
    drawn = [re.findall(r"([\d.]+) ([\d.]+)", path) for path in paths]
    found = [[(float(x), float(y)) for x, y in one] for one in drawn]
    return found[len(found) // 2 :]


def three_plots() -> list[str]:
    series = [Series("a", [1, 2, 3], [3.0, 2.0, 1.0]), Series("b", [1, 2, 3], [3.0, 2.5, 2.0])]
    return [
        plot.lines(series, **LABELS),
        plot.lines(series, **LABELS, log=True),
        plot.bars(["a", "b"], [1.0, 2.0], title="T", label="bytes"),
    ]


def sample_page() -> str:
    rows = [["a name of some length", *["123 456"] * 8], ["b", *["1"] * 8]]
    shown = report.table(["way", *["a heading"] * 8], rows, marked=1)
    section = report.section("Plots", "One paragraph.\n\nAnother.", *three_plots(), shown)
    tiles = report.section("Facts", "", report.tiles([("2×", "the speed"), ("1/2", "of it")]))
    about = {"command": "zcomm demo " + "--long-option " * 20, "cores": 2}
    return report.page("A report", about, [tiles, section])


def test_values_are_drawn_where_they_belong() -> None:
    picture = plot.lines([Series("a", [0, 5, 10], [10.0, 20.0, 15.0])], **LABELS)
    [[(x0, y0), (x1, y1), (x2, y2)]] = points(picture)
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.1)
    assert y1 < y0  # up is more


def test_logarithmic_axes_have_equal_steps_for_equal_ratios() -> None:
    series = [Series("a", [1, 10, 100], [1e3, 1e6, 1e9])]
    [[(x0, y0), (x1, y1), (x2, y2)]] = points(plot.lines(series, **LABELS, log=True))
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)


@pytest.mark.parametrize("low", [1e-9, 2.1, 7.3e8])
@pytest.mark.parametrize(
    "ratio", [1 + 1e-12, 1 + 1e-9, 1 + 2e-6, 1.001, 1.9, 4.9, 5.1, 240, 900, 1e7]
)
@pytest.mark.parametrize("log", [False, True])
def test_an_axis_of_any_length_has_a_few_ticks_that_differ(
    low: float, ratio: float, log: bool
) -> None:
    ticks = plot.axis([low, low * ratio], log, room=0.04).ticks()
    assert 2 <= len(set(ticks)) == len(ticks) <= 9


def test_bars_are_as_long_as_their_values() -> None:
    picture = plot.bars(["a", "b", "c"], [1.0, 4.0, math.nan], title="T", label="bytes")
    widths = [float(node.attrib["width"]) for node in parsed(picture).iter(f"{SVG}rect")]
    assert widths == pytest.approx([widths[1] / 4, widths[1], 0.0], abs=0.1)
    assert {"a", "b", "c", "1", "4", "nan"} <= set(texts(picture))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0])
def test_values_without_a_logarithm_are_left_out(bad: float) -> None:
    series = [Series("a", [1, 2, 3], [10.0, bad, 20.0])]
    [line] = points(plot.lines(series, **LABELS, log=True))
    assert len(line) == 2


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "series", [[], [Series("a", [], [])], [Series("a", [3], [7.0])], [Series("a", [1e30], [1e-30])]]
)
def test_few_or_no_values_still_give_a_picture(series: list[Series], log: bool) -> None:
    shown = texts(plot.lines(series, **LABELS, log=log))
    assert ("no values" in shown) == (not any(one.xs for one in series))


def test_a_plot_says_what_it_shows() -> None:
    picture = parsed(plot.lines([Series("codec", [1, 2], [3.0, 1.5])], **LABELS))
    assert picture.attrib["role"] == "img"
    assert picture.findtext(f"{SVG}title") == "T"
    assert picture.findtext(f"{SVG}desc") == "loss over step. codec: from 3 to 1.5"
    assert {"T", "loss", "step", "codec"} <= {node.text for node in picture.iter(f"{SVG}text")}


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.31, 5.55), (-3e-17, 4e-17), (1e20, 7e20)])
def test_even_ticks_are_few_round_numbers_within_the_axis(low: float, high: float) -> None:
    ticks = plot.axis([low, high], False).ticks()
    assert 4 <= len(ticks) <= 8
    assert all(low <= tick <= high for tick in ticks)
    assert all(
        len(f"{tick:.3g}".strip("-0.").split("e")[0].replace(".", "")) <= 2 for tick in ticks
    )


@pytest.mark.parametrize(("low", "high"), [(1.0, 60.0), (65536.0, 2.7e8), (1e-6, 1e12)])
def test_logarithmic_ticks_are_enough_and_not_too_many(low: float, high: float) -> None:
    assert 3 <= len(plot.axis([low, high], True).ticks()) <= 10


def test_ticks_do_not_touch_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "number", lambda value: f"{value:,.0f} bytes")  # long
    series = [Series("a", [2.0**k for k in range(60)], [1.0] * 60)]
    picture = parsed(plot.lines(series, **LABELS, log=True))
    centered = picture.findall(f".//{SVG}text[@text-anchor='middle']")
    ticks = [node for node in centered if (node.text or "").endswith(" bytes")]
    centers = [float(node.attrib["x"]) for node in ticks]
    halves = [plot.svg.text_width(node.text or "", 11) / 2 for node in ticks]
    gaps = [b - hb - a - ha for a, ha, b, hb in zip(centers, halves, centers[1:], halves[1:])]
    assert gaps
    assert min(gaps) > 0


def test_a_long_legend_stays_within_the_picture() -> None:
    names = [f"a rather long name {i}" for i in range(10)]
    picture = parsed(plot.lines([Series(name, [1, 2], [1.0, 2.0]) for name in names], **LABELS))
    for node in picture.iter(f"{SVG}text"):
        if node.text in names:
            assert float(node.attrib["x"]) + plot.svg.text_width(node.text) <= plot.WIDTH


def test_more_series_than_colors_differ_by_their_dashes() -> None:
    looks = {
        (plot.COLORS[i % len(plot.COLORS)], plot.dashes(i)) for i in range(3 * len(plot.COLORS))
    }
    assert len(looks) == 3 * len(plot.COLORS)


def test_long_lines_on_each_other_are_all_seen() -> None:
    series = [Series(name, range(100), [1.0] * 100) for name in "abcd"]
    paths = list(parsed(plot.lines(series, **LABELS)).iter(f"{SVG}path"))
    on_top = [node.attrib for node in paths[-len(series) :]]
    lengths = {node["stroke-dasharray"] for node in on_top}
    starts = sorted(-float(node["stroke-dashoffset"]) for node in on_top)
    assert lengths == {"12 36"}
    assert starts == [0, 12, 24, 36]


def test_pictures_side_by_side_are_one_document() -> None:
    picture = parsed(plot.side_by_side(three_plots(), name="all"))
    assert len(picture.findall(f"{SVG}g/{SVG}svg")) == 3
    assert float(picture.attrib["width"]) > 3 * plot.WIDTH


def test_everything_that_is_handed_over_is_escaped() -> None:
    series = [Series(HOSTILE, [1, 2], [1.0, 2.0])]
    picture = plot.lines(series, title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE)
    bars = plot.bars([HOSTILE], [1.0], title=HOSTILE, label=HOSTILE, show=lambda _: HOSTILE)
    table = report.table([HOSTILE], [[HOSTILE]])
    tiles = report.tiles([(HOSTILE, HOSTILE)])
    section = report.section(HOSTILE, HOSTILE, picture, bars, table, tiles)
    page = report.page(HOSTILE, {HOSTILE: HOSTILE}, [section])
    assert "<script" not in page
    assert unescape(page).count(HOSTILE) >= 18


def test_a_report_asks_for_nothing_from_elsewhere() -> None:
    page = sample_page().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|//\w|@import|url\(|<script|<img|<iframe", page)
    assert re.findall(r'(?:href|src)="([^"]*)"', page) == ["data:,"]


MEASURE = """<script>
const boxes = [...document.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect());
document.body.dataset.measured = JSON.stringify({
  plots: boxes.map(box => [box.width, box.height]),
  too_wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  series: getComputedStyle(document.querySelector("svg .series-0")).color,
});
</script>"""


def measured(html: str, folder: Path, *options: str) -> dict[str, object]:
    """Measures a report as Chromium renders it."""
    page = folder / "report.html"
    page.write_text(html.replace("</main>", f"</main>{MEASURE}"))
    document, console = chromium(page, *options)
    assert console == []
    found = re.search(r'data-measured="([^"]*)"', document)
    assert found
    return dict(json.loads(unescape(found[1])))


@pytest.mark.parametrize("width", [1300, 500])
def test_a_browser_shows_the_plots_in_light_and_dark(tmp_path: Path, width: int) -> None:
    size = f"--window-size={width},900"
    light = measured(sample_page(), tmp_path, size)
    dark = measured(sample_page(), tmp_path, size, "--blink-settings=preferredColorScheme=0")
    for shown in (light, dark):
        assert len(shown["plots"]) == 3
        assert all(300 < w <= width and h > 200 for w, h in shown["plots"])
        assert shown["too_wide"] == 0
    assert light["series"] != dark["series"]


def test_the_browser_would_tell_of_an_error(tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text("<script>nothing.there()</script><img src='missing.png'>")
    assert chromium(page)[1]
