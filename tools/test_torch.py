"""Runs the tests that depend on torch, and keeps the results of each version.

`make test-torch TORCH=2.15.0` runs it where that torch and the wheel are installed. It writes the
version's row in benchmarks/results/torch_versions.json; `make tables` shows all rows in the docs.

Usage: PYTHONPATH=benchmarks python tools/test_torch.py [options of pytest]
"""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from result_tables import TORCH_AREAS

from measuring import about
from zcomm.torch_private import fsdp

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/torch_versions.json"
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}
ORDINARY_ENDS = (0, 1)  # of pytest: all passed, some failed


def run(areas: dict[str, list[str]], options: list[str]) -> tuple[int, dict[str, Counter[str]]]:
    """Pytest's exit code, and how often tests of each area passed, failed and were skipped."""
    report = ROOT / f"build/torch-{torch.__version__}.xml"
    report.parent.mkdir(exist_ok=True)
    tests = [path for paths in areas.values() for path in paths]
    # Not `python -m pytest`, which would import zcomm from here in place of the wheel.
    pytest = [Path(sys.executable).parent / "pytest", f"--junitxml={report}", *options, *tests]
    code = subprocess.run(pytest, cwd=ROOT).returncode
    if code not in ORDINARY_ENDS:
        sys.exit(code)
    counts: dict[str, Counter[str]] = {area: Counter() for area in areas}
    for case in xml.parse(report).iter("testcase"):
        found = [OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES]
        counts[area_of(case.attrib["classname"], areas)][(found or ["passed"])[0]] += 1
    return code, counts


def area_of(module: str, areas: dict[str, list[str]]) -> str:
    """The area whose path is the longest one that the module is in."""
    path = f"{module.replace('.', '/')}.py"
    inside = [(len(p), area) for area, paths in areas.items() for p in paths if path.startswith(p)]
    return max(inside)[1]


def keep(row: dict[str, Any], described: dict[str, Any]) -> None:
    """Writes this version's row in place of an older one."""
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = [old for old in rows if old["torch"] != row["torch"]] + [row]
    rows.sort(key=lambda one: [int(part) for part in one["torch"].split(".")])
    described["commit"] = ", ".join(dict.fromkeys(one["commit"] for one in rows))
    RESULTS.write_text(json.dumps(described | {"rows": rows}, indent=2) + "\n")


def main() -> int:
    areas = {area: list(paths) for area, paths in TORCH_AREAS.items()}
    if fsdp.missing():
        print(f"without FSDP2: {fsdp.missing()}")
        del areas["FSDP2"]
    code, counts = run(areas, sys.argv[1:])
    described = about(command="make test-torch")
    version, commit = described.pop("torch").partition("+")[0], described.pop("commit")
    keep({"torch": version, "commit": commit, "areas": counts}, described)
    return code


if __name__ == "__main__":
    sys.exit(main())
