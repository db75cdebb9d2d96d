"""The output of `zcomm bench`: a table that grows row by row, and files."""

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zcomm.cli.bench.collective_rows import Row
from zcomm.report import page as report
from zcomm.report import plot
from zcomm.report.table import Table
from zcomm.report.units import show_bytes, show_seconds
from zcomm.report.usage import wrapped

HEADINGS = ("size", "codec", "sent", "time", "±", "algbw", "busbw", "speed", "error", "wrong")
WIDTHS = (5, 9, 7, 7, 3, 5, 5, 6, 7, 5)
LEGEND = (
    "sent: bytes that a rank sends. time: median of the rounds, ± half their range. algbw: size / "
    "time; busbw: algbw times the share each link must carry; both in GB/s. speed: the time of "
    "the backend's own collective / time. wrong: rounds whose result was too far off or not the "
    "same on all ranks."
)


class Output:
    """Prints rows as they arrive and keeps them. Only the leading process prints."""

    def __init__(self, about: Mapping[str, object], codecs: Sequence[str], leads: bool) -> None:
        self.about, self.leads = about, leads
        self.rows: list[Row] = []
        self.backends: list[str] = []  # one per row
        self.backend = self.kind = ""
        widths = list(WIDTHS)
        widths[1] = max([widths[1], *map(len, codecs)])
        self.table = Table(HEADINGS, widths, left=2)
        self._say(wrapped(" · ".join(f"{name} {value}" for name, value in about.items())))
        self._say(wrapped(LEGEND))

    def section(self, kind: str, backend: str) -> None:
        self.kind, self.backend = kind, backend
        self._say(f"\n{kind}, {self.about['ranks']} ranks, {self.about['link']}, {backend}")
        self._say(self.table.heading())

    def row(self, row: Row) -> None:
        self.rows.append(row)
        self.backends.append(self.backend)
        self._say(self.table.row(cells(row, self.backend)))

    def finish(self) -> int:
        """Prints the verdict and returns the exit code."""
        wrong = [(row, name) for row, name in zip(self.rows, self.backends) if row.wrong]
        self._say("")
        for row, name in wrong:
            rounds = f"{row.wrong} of {len(row.seconds)} rounds"
            self._say(f"WRONG: {row.kind} {show_size(row.nbytes)} {row.codec or name}: {rounds}")
        if not wrong:
            self._say(f"All {len(self.rows)} rows are correct in every round.")
        return 1 if wrong else 0

    def write(self, as_json: Path | None, as_csv: Path | None, as_html: Path | None) -> None:
        if not self.leads:
            return
        records = [record(row, name) for row, name in zip(self.rows, self.backends)]
        if as_json:
            as_json.write_text(json.dumps({"about": self.about, "rows": records}, indent=2) + "\n")
        if as_csv:
            write_csv(as_csv, records)
        if as_html:
            as_html.write_text(self._html())
        for path in filter(None, (as_json, as_csv, as_html)):
            self._say(f"wrote {path}")

    def _html(self) -> str:
        named = list(zip(self.rows, self.backends))
        kinds = dict.fromkeys((row.kind, name) for row, name in named)
        parts = [section_of(kind, name, named) for kind, name in kinds]
        link = f"{self.about['ranks']} ranks, {self.about['link']}"
        return report.page(f"Collectives with zcomm: {link}", self.about, parts)

    def _say(self, text: str) -> None:
        if self.leads:
            print(text, flush=True)


def cells(row: Row, backend: str) -> list[str]:
    return [
        show_size(row.nbytes),
        row.codec or backend,
        show_bytes(row.wire_nbytes),
        show_seconds(row.s),
        f"{100 * row.spread:.0f}%",
        show_gigabytes(row.algbw),
        show_gigabytes(row.busbw),
        f"{row.speedup:.2f}×",
        "0" if row.error == 0 else f"{row.error:.1e}",
        str(row.wrong),
    ]


def show_gigabytes(nbytes: float) -> str:
    value = nbytes / 1e9
    return f"{value:.3f}" if value < 9.9995 else f"{value:.2f}"


def show_size(nbytes: int) -> str:
    """As users type sizes: 64K; the nearest one if the ranks do not divide it."""
    for unit, suffix in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if nbytes >= 0.99 * unit:
            return f"{nbytes / unit:.3g}{suffix}"
    return str(nbytes)


def record(row: Row, backend: str) -> dict[str, Any]:
    """A row of a file, in bytes and seconds."""
    return {
        "backend": backend,
        "collective": row.kind,
        "codec": row.codec or backend,
        "ranks": row.ranks,
        "size_bytes": row.nbytes,
        "wire_bytes": row.wire_nbytes,
        "time_s": row.s,
        "fastest_s": min(row.seconds),
        "slowest_s": max(row.seconds),
        "algbw_bytes_per_s": row.algbw,
        "busbw_bytes_per_s": row.busbw,
        "speedup": row.speedup,
        "error": row.error,
        "wrong": row.wrong,
        "rounds": len(row.seconds),
        "cpu_s": row.cpu_s,
    }


def write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def section_of(kind: str, backend: str, named: Iterable[tuple[Row, str]]) -> str:
    rows = [row for row, name in named if (row.kind, name) == (kind, backend)]
    x_label = "tensor size, MB"
    busbw = series(rows, backend, lambda row: row.busbw / 1e9)
    times = series(rows, backend, lambda row: 1e3 * row.s)
    plots = (
        plot.lines(busbw, title="Bus bandwidth", x_label=x_label, y_label="GB/s", log=True),
        plot.lines(times, title="Time", x_label=x_label, y_label="ms", log=True),
    )
    shown = report.table(HEADINGS, [cells(row, backend) for row in rows], left=2)
    return report.section(f"{kind}, {backend}", LEGEND, *plots, shown)


def series(rows: Sequence[Row], backend: str, value: Callable[[Row], float]) -> list[plot.Series]:
    found = []
    for codec in dict.fromkeys(row.codec for row in rows):
        ours = [row for row in rows if row.codec == codec]
        xs = [row.nbytes / 1e6 for row in ours]
        found.append(plot.Series(codec or backend, xs, [value(row) for row in ours]))
    return found
