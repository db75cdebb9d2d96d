"""The pages of the documentation and the code blocks in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README, GUIDE = ROOT / "README.md", ROOT / "docs/guide.md"
PAGES = (README, *sorted(ROOT.glob("docs/*.md")))
PYTHON, RANKS, DIFF = "python", "python ranks=2", "diff ranks=2"


def blocks(page: Path, mark: str) -> list[str]:
    """The code blocks of a page whose fence has this mark."""
    fence = re.compile(rf"^```{mark}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return fence.findall(page.read_text())


def pages_with(mark: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, mark)]
