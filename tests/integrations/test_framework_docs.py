"""The diffs in docs/frameworks.md train as written, before and after, under torchrun.

The tests append lines that report the result, and change none of the script.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from pages import ROOT, blocks
from scripts import torchrun

PAGE = ROOT / "docs/frameworks.md"
FRAMEWORKS = ("lightning", "transformers", "accelerate")

# Where each framework keeps the last loss, the model and the handle.
FOUND = {
    "lightning": """
loss = float(trainer.callback_metrics["loss"])
handles = [found.handle for found in trainer.callbacks if hasattr(found, "handle")]
""",
    "transformers": """
loss = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]
handles = [c.handle for c in trainer.callback_handler.callbacks if hasattr(c, "handle")]
""",
    "accelerate": """
loss = loss.item()
handles = [handle] if "handle" in globals() else []
""",
}
REPORT = """
import hashlib, json, os
import torch
flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
stats = [(h.stats().steps, h.stats().raw_bytes, h.stats().wire_bytes) for h in handles]
digest = hashlib.sha256(bytes(flat.view(torch.uint8).tolist())).hexdigest()
with open(f"report-{os.environ['RANK']}.json", "w") as file:
    json.dump({"loss": loss, "parameters": digest, "stats": stats}, file)
"""


@cache
def reports(framework: str, dropped: str) -> list[dict[str, Any]]:
    """What both ranks report; "+" drops the new lines of the diff, "-" the old ones."""
    [diff] = blocks(PAGE, f"diff {framework}")
    lines = [line[1:] for line in diff.splitlines() if not line.startswith(dropped)]
    with TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text("\n".join([*lines, FOUND[framework], REPORT]))
        torchrun(script)
        return [json.loads((Path(folder) / f"report-{r}.json").read_text()) for r in range(2)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_before_it_is_the_framework_alone(framework: str) -> None:
    first, second = reports(framework, "+")
    assert first["stats"] == second["stats"] == []
    assert first["parameters"] == second["parameters"]


# Untrained, the losses are log 10, and log 64: 2.3 and 4.2.
LEARNED = {"lightning": 1.2, "transformers": 1.0, "accelerate": 1.2}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_after_it_bytes_are_compressed_and_the_loss_falls(framework: str) -> None:
    plain, compressed = reports(framework, "+"), reports(framework, "-")
    assert compressed[0]["parameters"] == compressed[1]["parameters"]
    assert compressed[0]["parameters"] != plain[0]["parameters"]
    for before, after in zip(plain, compressed):
        [(steps, raw_bytes, wire_bytes)] = after["stats"]
        assert steps >= 64
        assert raw_bytes > 5 * wire_bytes
        assert after["loss"] < LEARNED[framework]
        assert after["loss"] == pytest.approx(before["loss"], abs=0.15)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_diffs_are_short(framework: str) -> None:
    [diff] = blocks(PAGE, f"diff {framework}")
    changes = [line[0] for line in diff.splitlines() if line.startswith(("+", "-"))]
    assert len(changes) <= 3


def test_accelerate_saves_as_written(tmp_path: Path) -> None:
    [diff], [saving] = blocks(PAGE, "diff accelerate"), blocks(PAGE, "python accelerate")
    lines = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    script = tmp_path / "train.py"
    script.write_text("\n".join([*lines, saving]).replace("range(8)", "range(1)"))
    torchrun(script)
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == [
        "zcomm_rank0.pt",
        "zcomm_rank1.pt",
    ]
