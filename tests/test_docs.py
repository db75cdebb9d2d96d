"""The Python in the documentation runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    path
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
    if BLOCK.search(path.read_text())
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_python_blocks_run_in_order(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n".join(BLOCK.findall(page.read_text())))
    command = [sys.executable, "-I", str(script)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, f"{page.name}:\n{result.stderr}"
