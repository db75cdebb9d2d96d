"""Shows a page in Debian's chromium, where it is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def chromium(page: Path, *options: str) -> tuple[str, list[str]]:
    """The document after it was shown, and what the browser's console said."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    profile = f"--user-data-dir={page.parent / 'profile'}"
    switches = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", profile]
    command = [browser, *switches, *options, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
