"""The daily commands: `make` lists them all, and hooks run what `make lint` runs."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pages import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
# Targets that are parts of others, which the list leaves out.
PARTS = {"cuda-proof", "triton-proof", "cuda-proof-steps", "triton-proof-steps"}

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def words(variable: str) -> list[str]:
    """The value of a variable of the Makefile."""
    joined = MAKEFILE.replace("\\\n", " ")
    [value] = re.findall(rf"^{re.escape(variable)} *:?=(.*)$", joined, re.MULTILINE)
    return value.split()


def commands() -> list[str]:
    """The targets that people type."""
    [phony] = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    return [target for target in phony.split() if target not in {*PARTS, "$(LINTS)"}]


def make(*arguments: str) -> str:
    """What make prints, not as a part of the make that runs the tests."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    return run.stdout


@needs_make
def test_make_alone_prints_every_command_in_one_line() -> None:
    listed = [line.split(maxsplit=1) for line in make().splitlines()]
    assert sorted(name for name, _ in listed) == sorted(commands())


def test_the_hooks_run_what_make_lint_runs() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    entries = re.findall(r"^ +entry: make --no-print-directory (\S+)$", hooks, re.MULTILINE)
    assert entries == words("LINTS")
    assert entries == re.findall(r"^(lint-\S+):", MAKEFILE, re.MULTILINE)
    # make lint has no recipe of its own.
    assert re.search(r"^lint: \$\(LINTS\) ##.*\n\n", MAKEFILE, re.MULTILINE)


@needs_make
def test_the_fast_tests_exist() -> None:
    """And there is more than a handful: pytest without paths would run all tests."""
    shown = make("--dry-run", "--assume-old", ".venv/tools", "test-fast")
    paths = re.findall(r"tests/[^\s:]+", shown)
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_no_test_imports_another() -> None:
    """What tests share lives in tests/support."""
    files = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "emulator" / "tests").glob("test_*.py")]
    imports = re.compile(r"^(?:from|import) test_\w+", re.MULTILINE)
    inside = {str(f.relative_to(ROOT)): imports.findall(imports_of(f)) for f in files}
    assert {name: found for name, found in inside.items() if found} == {}


def imports_of(path: Path) -> str:
    """The imports of a module, one to a line; not those in its strings."""
    tree = ast.parse(path.read_text())
    nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    return "\n".join(map(ast.unparse, nodes))
