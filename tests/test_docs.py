"""The Python in the documentation runs: plain blocks here, those marked ranks=2 under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))


def blocks(page: Path, mark: str) -> list[str]:
    fence = re.compile(rf"^```{mark}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return fence.findall(page.read_text())


def run(command: list[str], folder: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def torchrun(script: Path) -> None:
    # A free port of the machine's choice: tests run side by side.
    options = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    run([sys.executable, "-P", "-m", "torch.distributed.run", *options, str(script)], script.parent)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p, "python")], ids=lambda path: path.name
)
def test_python_blocks_run_in_order(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n".join(blocks(page, "python")))
    run([sys.executable, "-I", str(script)], tmp_path)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p, "python ranks=2")], ids=lambda path: path.name
)
def test_blocks_for_ranks_run_in_order(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n".join(blocks(page, "python ranks=2")))
    torchrun(script)


DIFFS = blocks(ROOT / "README.md", "diff ranks=2")


def test_the_diffs_are_short() -> None:
    changes = [[x[0] for x in diff.splitlines() if x.startswith(("+", "-"))] for diff in DIFFS]
    assert [(signs.count("+"), signs.count("-")) for signs in changes] == [(2, 0), (3, 2)]


@pytest.mark.parametrize("dropped", ["+", "-"], ids=["before", "after"])
@pytest.mark.parametrize("diff", DIFFS, ids=["compress", "ZeroOptimizer"])
def test_quick_starts_run_as_written(diff: str, dropped: str, tmp_path: Path) -> None:
    lines = diff.splitlines()
    assert all(line[:1] in ("", " ", "+", "-") for line in lines)
    script = tmp_path / "train.py"
    script.write_text("\n".join(line[1:] for line in lines if not line.startswith(dropped)))
    torchrun(script)
