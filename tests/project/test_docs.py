"""The documentation is true: its Python runs, its commands exist, its links lead somewhere.

Plain blocks of a page run in one process; blocks marked ranks=2 run under torchrun.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import zcomm.fsdp
import zcomm.monitor
from pages import DIFF, GUIDE, PAGES, PYTHON, RANKS, README, ROOT, blocks, pages_with
from scripts import python, torchrun
from zcomm.cli import make_parser
from zcomm.transport.shared_memory.ring import segment_nbytes, slot_nbytes

# `make test-integrations` runs the whole scripts; the guide shows excerpts of them.
FRAMEWORKS = ("diff lightning", "diff transformers", "diff accelerate")


def page_name(page: object) -> str:
    return page.name if isinstance(page, Path) else str(page)


# Code.


@pytest.mark.parametrize("page", [README, GUIDE], ids=page_name)
def test_every_block_is_of_a_kind_that_is_run(page: Path) -> None:
    fences = re.findall(r"^\s*```(.*)$", page.read_text(), re.MULTILINE)
    assert set(fences[::2]) <= {PYTHON, RANKS, DIFF, *FRAMEWORKS}
    assert set(fences[1::2]) == {""}


@pytest.mark.parametrize("page", pages_with(PYTHON), ids=page_name)
def test_python_blocks_run_in_order(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n".join(blocks(page, PYTHON)))
    python(script)


@pytest.mark.parametrize("page", pages_with(RANKS), ids=page_name)
def test_blocks_for_ranks_run_in_order(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n".join(blocks(page, RANKS)))
    torchrun(script)


DIFFS = [(page, i, diff) for page in PAGES for i, diff in enumerate(blocks(page, DIFF))]


def test_the_diffs_are_short() -> None:
    diffs = blocks(README, DIFF)
    changes = [[x[0] for x in diff.splitlines() if x.startswith(("+", "-"))] for diff in diffs]
    assert [(signs.count("+"), signs.count("-")) for signs in changes] == [(2, 0), (3, 2)]


@pytest.mark.parametrize("dropped", ["+", "-"], ids=["before", "after"])
@pytest.mark.parametrize("diff", [d for *_, d in DIFFS], ids=[f"{p.stem}-{i}" for p, i, _ in DIFFS])
def test_quick_starts_run_as_written(diff: str, dropped: str, tmp_path: Path) -> None:
    lines = diff.splitlines()
    assert all(line[:1] in ("", " ", "+", "-") for line in lines)
    script = tmp_path / "train.py"
    script.write_text("\n".join(line[1:] for line in lines if not line.startswith(dropped)))
    torchrun(script, attempts=1 if "import zcomm" in script.read_text() else 3)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_diffs_for_frameworks_are_excerpts_of_what_is_run(framework: str) -> None:
    [whole] = blocks(ROOT / "docs/frameworks.md", framework)
    [excerpt] = blocks(GUIDE, framework)
    lines = iter(whole.splitlines())
    assert all(line in lines for line in excerpt.splitlines()), excerpt  # in their order


# Commands on their own line are complete; those in a sentence may omit options.


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_can_be_typed(page: Path) -> None:
    for line in re.findall(r"^    (?:\$ )?zcomm (.*)$", page.read_text(), re.MULTILINE):
        make_parser().parse_args(shlex.split(line, comments=True))  # or it ends the process


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_in_sentences_have_known_options(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for typed in re.findall(r"`zcomm ([^`]+)`", page.read_text()):
        command, *words = shlex.split(typed)
        with pytest.raises(SystemExit) as ended:
            make_parser().parse_args([command, "--help"])
        assert ended.value.code == 0, typed
        known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
        assert {word for word in words if word.startswith("--")} <= known, typed


# Pages.


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


def test_the_api_page_lists_every_public_name() -> None:
    listed = re.findall(r"^::: zcomm\.(\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    packages = {"fsdp": zcomm.fsdp, "monitor": zcomm.monitor}
    public = {name for name in zcomm.__all__ if name not in packages}
    for package, module in packages.items():
        public |= {f"{package}.{name}" for name in module.__all__}
    assert sorted(listed) == sorted(public)


def test_the_table_of_segments_is_that_of_the_code() -> None:
    page = (ROOT / "docs/shared-memory.md").read_text()
    rows = re.findall(
        r"^\| (\d+) \| (\d+) KiB \| (\d+) KiB \| ([\d.]+) MiB \|$", page, re.MULTILINE
    )
    assert len(rows) == 5
    for ranks, *sizes in rows:
        slot, segment = slot_nbytes(int(ranks)), segment_nbytes(int(ranks))
        every = f"{int(ranks) * segment / 2**20:.1f}"
        assert sizes == [str(slot >> 10), str(segment >> 10), every]


# Links.


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub derives from headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "benchmarks/README.md"], ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", without_code(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


# Prose.

PROSE = [
    *PAGES,
    *(
        ROOT / f"{name}.md"
        for name in ("CHANGELOG", "CONTRIBUTING", "benchmarks/README", "emulator/README")
    ),
]
WIDTH = 110


def prose(page: Path) -> list[str]:
    """Lines of text without tables, code and the targets of links."""
    lines = without_code(page).splitlines()
    text = [line for line in lines if not line.startswith(("|", "    "))]
    return [re.sub(r"\]\([^)]*\)", "]", line) for line in text]


@pytest.mark.parametrize("page", PROSE, ids=page_name)
def test_lines_of_prose_are_short(page: Path) -> None:
    assert [line for line in prose(page) if len(line) > WIDTH] == []
