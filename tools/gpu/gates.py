"""Requirements for every kernel's machine code: complete, in registers, 128-bit accesses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gpu.machine_code import Resources, architectures, opcodes, resources

ARCHITECTURES = (75, 80, 90, 100, 120)
PLAIN = ("none", "bf16", "fp16")
BLOCKS = ("int8", "fp8", "int4", "lm4", "lm3", "lm2", "sign")
ROWS = (1, 2, 4, 8)  # rows of 128 elements in a block
DIGITS = tuple(f"zc_topk_digit_{i}" for i in range(3))

# Registers per thread, by rows per block. A multiprocessor has 65,536, so it runs 5, 3 or 2 CTAs of
# 128 threads, or 6 for codecs without blocks. lm* hold a block's rows twice.
CAPS = {1: 96, 2: 96, 4: 168, 8: 224}
LM_CAPS = CAPS | {8: 248}
OTHER_CAP = 80

LOAD, STORE = "LDG", "STG"  # global memory
LOCAL = ("LDL", "STL")


def expected_kernels() -> dict[str, tuple[int, tuple[str, ...]]]:
    """For every kernel, how many registers it may use and which accesses must be 128 bits wide."""
    kernels: dict[str, tuple[int, tuple[str, ...]]] = {}
    kernels |= {f"zc_encode_{codec}": (OTHER_CAP, (LOAD, STORE)) for codec in PLAIN}
    kernels |= {f"zc_decode_{codec}": (OTHER_CAP, (STORE,)) for codec in (*PLAIN, "topk")}
    kernels["zc_decode_none"] = (OTHER_CAP, (LOAD, STORE))  # its wire holds floats
    for codec in BLOCKS:
        caps = LM_CAPS if codec.startswith("lm") else CAPS
        kernels |= {f"zc_encode_{codec}_{rows}": (caps[rows], (LOAD, STORE)) for rows in ROWS}
        kernels |= {f"zc_decode_{codec}_{rows}": (caps[rows], (STORE,)) for rows in ROWS}
    kernels |= dict.fromkeys((*DIGITS, "zc_topk_count", "zc_find_idle"), (OTHER_CAP, (LOAD,)))
    kernels["zc_topk_write"] = (OTHER_CAP, (LOAD, STORE))
    return kernels


def failures(path: Path, disassembled: Sequence[int] = ARCHITECTURES) -> list[str]:
    """All violations in the object at `path`.

    Checks instructions for the architectures in `disassembled`, and resources for all.
    """
    return [
        *architecture_failures(path),
        *resource_failures(resources(path)),
        *instruction_failures(opcodes(path, disassembled), disassembled),
    ]


def architecture_failures(path: Path) -> list[str]:
    found = architectures(path)
    wrong = []
    if found.machine_code != set(ARCHITECTURES):
        wrong.append(_line("architectures", sorted(ARCHITECTURES), sorted(found.machine_code)))
    if found.ptx != {max(ARCHITECTURES)}:
        wrong.append(_line("PTX", f"that of {max(ARCHITECTURES)}", sorted(found.ptx)))
    return wrong


def resource_failures(found: Sequence[Resources]) -> list[str]:
    kernels, wrong = expected_kernels(), []
    for arch in ARCHITECTURES:
        names = sorted(r.kernel for r in found if r.arch == arch)
        if names != sorted(kernels):
            odd = sorted(set(names) ^ set(kernels))
            wrong.append(_line(f"sm_{arch}", f"{len(kernels)} kernels", f"{len(names)}: {odd}"))
    for r in found:
        where, (cap, _) = f"{r.kernel} sm_{r.arch}", kernels.get(r.kernel, (0, ()))
        if r.stack or r.local:
            wrong.append(_line(where, "all in registers", f"{r.stack + r.local} bytes of stack"))
        if r.registers > cap:
            wrong.append(_line(where, f"at most {cap} registers", r.registers))
    return wrong


def instruction_failures(
    found: dict[tuple[str, int], Counter[str]], arches: Sequence[int]
) -> list[str]:
    wrong = []
    for kernel, (_, accesses) in expected_kernels().items():
        for arch in arches:
            where, counts = f"{kernel} sm_{arch}", found.get((kernel, arch), Counter())
            wrong += [
                _line(where, f"{access} of 128 bits", "none")
                for access in accesses
                if not count(counts, access, "128")
            ]
            local = sum(count(counts, access) for access in LOCAL)
            if local:
                wrong.append(_line(where, "no LDL or STL", local))
    return wrong


def count(opcodes: Counter[str], name: str, modifier: str = "") -> int:
    """Instructions with this name: LDG.E.128.CONSTANT is an LDG with modifier 128."""
    parts = {opcode: opcode.split(".") for opcode in opcodes}
    return sum(
        opcodes[opcode]
        for opcode, (first, *rest) in parts.items()
        if first == name and (not modifier or modifier in rest)
    )


def _line(where: str, expected: object, got: object) -> str:
    return f"{where}: expected {expected}, got {got}"
