"""An mkdocs hook that handles what GitHub understands in docs/*.md and mkdocs does not.

Links out of docs/ go to the repository: to `repo_url` if it is set, or else to this clone's files.
Marks on code blocks (`python ranks=2`, `diff lightning`) are for tests and are dropped.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    base = f"{config.repo_url.rstrip('/')}/blob/main" if config.repo_url else ROOT.as_uri()
    markdown = re.sub(r"\]\(\.\./", f"]({base}/", markdown)
    return re.sub(r"^( *```)(python|diff) .*$", r"\1\2", markdown, flags=re.MULTILINE)
