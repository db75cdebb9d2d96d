"""Published figures come from benchmarks/results, and the pages say where each was measured."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pages import ROOT

RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(ROOT / "tools")
    yield importlib.import_module("make_result_tables")
    for name in ("make_result_tables", "result_tables"):
        sys.modules.pop(name, None)


def test_every_table_agrees_with_its_results(tool: Any) -> None:
    for page in tool.pages():
        assert tool.rewritten(page.read_text()) == page.read_text(), f"{page}: run `make tables`"


def test_every_table_stands_on_one_page(tool: Any) -> None:
    found = [name for page in tool.pages() for name, _ in tool.MARKED.findall(page.read_text())]
    assert sorted(found) == sorted(tool.TABLES)


def test_a_changed_figure_is_noticed(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    published = (ROOT / "README.md").read_text()
    assert "202 ms" in published
    page.write_text(published.replace("202 ms", "201 ms"))
    monkeypatch.setattr(tool, "pages", lambda: [page])
    for name in (*tool.TABLES["headline"].files, *tool.TABLES["one-host"].files):
        tool.results(name)  # which keeps them: from here on ROOT is another folder
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["make_result_tables.py", "--check"])
    assert tool.main() == 1
    assert "make tables" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["make_result_tables.py"])
    assert tool.main() == 0
    assert page.read_text() == published


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path: Path, tool: Any) -> None:
    results = json.loads(path.read_text())
    assert {"machine", "cpu", "cores", "commit", "command", "rows"} <= results.keys()
    assert re.fullmatch(r"(python benchmarks/\w+\.py|make [\w-]+)( .*)?", results["command"])
    assert any(path.stem in table.files for table in tool.TABLES.values())


def test_tables_name_their_machine_and_commit(tool: Any) -> None:
    for name, table in tool.TABLES.items():
        text = tool.text_of(table)
        for file in table.files:
            assert re.search(rf"`{file}\.json`\s+\(commit\s+`", text), name
        assert "AMD EPYC" in text


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md", "docs/zero.md"])
def test_no_table_of_figures_is_written_by_hand(page: str, tool: Any) -> None:
    by_hand = tool.MARKED.sub("", (ROOT / page).read_text())
    assert re.findall(r"^\|.*\d (?:ms|MB)\b.*|^\|.*\d\.\d\d.*", by_hand, re.MULTILINE) == []
