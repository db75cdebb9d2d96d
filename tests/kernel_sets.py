"""The kernel sets that this machine has; tests run over all of them."""

from __future__ import annotations

import zcomm

_PRESENT = [name for name, reason in zcomm.available_kernels().items() if not reason]
# "cpu" is one of the cpu:<isa> sets under another name.
KERNEL_SETS = [name for name in _PRESENT if name != "cpu"]
# Without the compiled sets the tests would compare the reference with itself.
assert "cpu:scalar" in KERNEL_SETS, zcomm.available_kernels()

SPECS = [
    "none",
    "bf16",
    "fp16",
    "int8",
    "fp8",
    "int4",
    "lm4",
    "lm3",
    "lm2",
    "sign",
    "topk:0.1",
    "int4:block=32",
    "lm3:block=1024",
]
