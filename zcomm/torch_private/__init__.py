"""Every private corner of torch that zcomm touches, one module per corner.

A private name of torch appears here and nowhere else. Each corner has `missing()`: "" if this torch
has its names, else a text that names those it lacks. What needs one of them raises a RuntimeError
with that text when it is imported or called; calls that work are not checked again.

Imports: torch alone. Start with probe.py, then autograd.py, the smallest corner.
"""

import importlib

CORNERS = (
    "autograd",
    "c10d",
    "checkpoint",
    "ddp",
    "foreach",
    "fsdp",
    "optimizers",
    "state_dicts",
    "tensors",
)


def missing() -> dict[str, str]:
    """What this torch lacks, by corner. Imports torch's FSDP and compiler, which takes seconds."""
    found = {name: importlib.import_module(f"{__name__}.{name}").missing() for name in CORNERS}
    return {name: text for name, text in found.items() if text}
