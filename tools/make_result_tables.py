"""Writes the results tables in the docs from benchmarks/results/*.json.

Each table goes between `<!-- table: NAME -->` and `<!-- end -->`; result_tables.py lists them all.
A line below each table names the sources of its figures: machine, file and commit.

Usage: python tools/make_result_tables.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

from result_tables import TABLES, Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "benchmarks/results"
PAGES = ("README.md", "benchmarks/README.md", "docs/*.md")
MARKED = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->\n", re.DOTALL)
ISAS = {"avx2": "AVX2", "avx512": "AVX-512"}


@cache
def results(name: str) -> dict[str, Any]:
    path = ROOT / RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    missing = {"machine", "cpu", "cores", "commit", "command", "rows"} - found.keys()
    if missing:
        raise ValueError(f"{path}: expected {', '.join(sorted(missing))}")
    return found


def machine(of: dict[str, Any]) -> str:
    words = [of["cpu"], f"{of['cores']} cores"]
    words += [ISAS.get(of["isa"], of["isa"])] if "isa" in of else []
    words += [f"torch {of['torch'].partition('+')[0]}"] if "torch" in of else []
    return ", ".join(words)


def commits(of: dict[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in of["commit"].split(", "))


def sources(table: Table) -> str:
    """The machines, and for each machine its files and their commits."""
    files: dict[str, list[str]] = {}
    for name in table.files:
        of = results(name)
        files.setdefault(machine(of), []).append(f"`{name}.json` (commit {commits(of)})")
    words = " ".join(f"{where}: {', '.join(found)}." for where, found in files.items())
    return textwrap.fill(words, 110, break_long_words=False, break_on_hyphens=False)


def text_of(table: Table) -> str:
    lines = table.lines(*(results(name) for name in table.files))
    cells = [table.head, ["---"] * len(table.head), *lines]
    drawn = "".join("| " + " | ".join(line) + " |\n" for line in cells)
    return f"\n{drawn}\n" + sources(table) + "\n\n"


def rewritten(page: str) -> str:
    """The page with its tables regenerated. Raises KeyError if it names an unknown table."""

    def marked(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- table: {name} -->\n{text_of(TABLES[name])}<!-- end -->\n"

    return MARKED.sub(marked, page)


def pages() -> list[Path]:
    return [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def main() -> int:
    stale = []
    for path in pages():
        before = path.read_text()
        after = rewritten(before)
        if before == after:
            continue
        if "--check" in sys.argv:
            stale.append(str(path.relative_to(ROOT)))
        else:
            path.write_text(after)
    if stale:
        print("tables differ from their results, run `make tables`:", *stale)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
