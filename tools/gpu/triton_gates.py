"""Requirements for Triton's kernels on each kind of GPU: all in registers, nothing spilled."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpu.machine_code import resources

NVIDIA = (80, 90, 100, 120)
AMD = ("gfx90a", "gfx942")


class CompiledVariant(Protocol):
    """The same as Compiled in emulator/triton_compiler.py."""

    @property
    def variant(self) -> str: ...
    @property
    def assembly(self) -> str: ...
    @property
    def binary(self) -> str: ...


@dataclass(frozen=True)
class Use:
    """Registers per thread, and what did not fit: bytes of stack, and spilled registers (AMD).

    AMD's scalar registers spill into lanes of vector registers, not into memory; `scalar_spills`
    counts those.
    """

    variant: str
    target: str
    registers: int
    stack: int
    spills: int = 0
    scalar_spills: int = 0

    @property
    def failure(self) -> str:
        if not self.stack and not self.spills:
            return ""
        spilled = f" and {self.spills} spilled registers" if self.spills else ""
        got = f"{self.stack} bytes of stack{spilled}"
        return f"{self.variant} {self.target}: expected all in registers, got {got}"


def uses(target: str, compiled: Iterable[CompiledVariant]) -> list[Use]:
    """The use of all variants for one target, several variants at a time."""
    read = _nvidia if target.startswith("sm_") else _amd
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda one: read(target, one), compiled))


def _nvidia(target: str, one: CompiledVariant) -> Use:
    (found,) = resources(Path(one.binary))
    return Use(one.variant, target, found.registers, found.stack + found.local)


def _amd(target: str, one: CompiledVariant) -> Use:
    """Read from the code object's metadata in the assembly."""
    text = Path(one.assembly).read_text()

    def figure(name: str) -> int:
        (value,) = re.findall(rf"^\s*\.{name}:\s*(\d+)\s*$", text, re.M)
        return int(value)

    stack = figure("private_segment_fixed_size")
    spills = figure("vgpr_spill_count"), figure("sgpr_spill_count")
    return Use(one.variant, target, figure("vgpr_count"), stack, *spills)


def rows(found: Iterable[Use]) -> Iterator[tuple[str, ...]]:
    """A table of variants by targets: registers, and spilled bytes or (scalar registers)."""
    by_variant: dict[str, dict[str, Use]] = {}
    for use in found:
        by_variant.setdefault(use.variant, {})[use.target] = use
    targets = list(dict.fromkeys(t for row in by_variant.values() for t in row))
    yield ("kernel", *targets)
    for variant, row in by_variant.items():
        yield (variant, *(_cell(row[target]) for target in targets))


def _cell(use: Use) -> str:
    scalar = f" ({use.scalar_spills})" if use.scalar_spills else ""
    return f"{use.registers}" + (f" + {use.stack} B" if use.failure else scalar)
