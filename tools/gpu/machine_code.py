"""The machine code inside a shared object, as cuobjdump and nvdisasm show it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {"cuobjdump": "nvidia-cuda-cuobjdump", "nvdisasm": "nvidia-cuda-nvdisasm"}


@dataclass(frozen=True)
class Resources:
    """What a kernel needs from a multiprocessor, for one architecture (75 is sm_75)."""

    kernel: str
    arch: int
    registers: int
    stack: int
    local: int


@dataclass(frozen=True)
class Architectures:
    """What an object contains: machine code, and PTX for newer GPUs."""

    machine_code: frozenset[int]
    ptx: frozenset[int]


def missing() -> str:
    """Why machine code cannot be read here; "" if it can."""
    absent = [PACKAGES[tool] for tool in PACKAGES if _tool(tool) is None]
    return f"pip install {' '.join(absent)}" if absent else ""


def architectures(path: Path) -> Architectures:
    found = {kind: _arches(_run("cuobjdump", f"-l{kind}", path)) for kind in ("elf", "ptx")}
    return Architectures(found["elf"], found["ptx"])


def resources(path: Path) -> list[Resources]:
    """The resources of every kernel, for every architecture."""
    found, arch, kernel = [], 0, ""
    for line in _run("cuobjdump", "--dump-resource-usage", path).splitlines():
        if match := re.match(r"arch = sm_(\d+)", line):
            arch = int(match[1])
        elif match := re.match(r"\s*Function (\w+):", line):
            kernel = match[1]
        elif "REG:" in line:
            figures = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
            found.append(
                Resources(kernel, arch, figures["REG"], figures["STACK"], figures["LOCAL"])
            )
    return found


def opcodes(path: Path, arches: Iterable[int]) -> dict[tuple[str, int], Counter[str]]:
    """How often each opcode (`LDG.E.128`) occurs, by kernel and architecture."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        cubins = [(cubin, arch) for arch in arches for cubin in _cubins(path, arch, Path(folder))]
        texts = pool.map(lambda cubin: _run("nvdisasm", "-c", "-ndf", cubin[0]), cubins)
        found: dict[tuple[str, int], Counter[str]] = {}
        for (_, arch), text in zip(cubins, texts):
            for kernel, counts in _parsed(text):
                found[kernel, arch] = counts
    return found


def _cubins(path: Path, arch: int, folder: Path) -> list[Path]:
    inside = folder / str(arch)
    inside.mkdir()
    _run("cuobjdump", "-xelf", f"sm_{arch}", path.resolve(), cwd=inside)
    return sorted(inside.glob("*.cubin"))


def _parsed(text: str) -> Iterator[tuple[str, Counter[str]]]:
    # .text.zc_encode_int4_1:
    #         /*0070*/                   @P0 LDG.E.128 R4, desc[UR6][R2.64] ;
    instruction = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
    for section in re.split(r"^\.text\.(?=\w+:$)", text, flags=re.MULTILINE)[1:]:
        kernel, code = section.split(":", 1)
        lines = (instruction.match(line) for line in code.splitlines())
        yield kernel, Counter(match[1] for match in lines if match)


def _arches(listing: str) -> frozenset[int]:
    return frozenset(int(arch) for arch in re.findall(r"\.sm_(\d+)\w*\.", listing))


def _tool(name: str) -> str | None:
    installed = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin" / name
    return str(installed) if installed.exists() else shutil.which(name)


def _run(tool: str, *args: str | Path, cwd: Path | None = None) -> str:
    program = _tool(tool)
    if program is None:
        raise RuntimeError(f"expected {tool}, got none: pip install {PACKAGES[tool]}")
    command = [program, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout
