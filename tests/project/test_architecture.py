"""The architecture is written down: every package is layered, introduced, and on the page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/architecture.md"
PACKAGES = sorted(path.parent.name for path in ROOT.glob("zcomm/*/__init__.py"))
MODULES = sorted(path.stem for path in ROOT.glob("zcomm/[!_]*.py"))


@pytest.mark.parametrize("name", [*PACKAGES, *MODULES])
def test_the_architecture_page_names_every_package(name: str) -> None:
    assert re.search(rf"\b{name}\b", PAGE.read_text()), f"{PAGE.name} does not name zcomm/{name}"


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_says_what_is_in_it(name: str) -> None:
    source = (ROOT / "zcomm" / name / "__init__.py").read_text()
    lines = (ast.get_docstring(ast.parse(source)) or "").splitlines()
    assert len(lines) >= 5, "expected what is here, what it may import, where to start reading"


def test_the_import_contract_has_every_package_in_one_layer() -> None:
    found = re.search(r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert found is not None
    layers = re.findall(r'"(.*?)"', found[1])
    assert len(layers) <= 11
    assert sorted(name for layer in layers for name in layer.split(" | ")) == sorted(
        [*PACKAGES, *MODULES]
    )
