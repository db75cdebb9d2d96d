"""Vector instructions occur only in code that runs after a CPU feature check."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

import zcomm._core

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 instruction sets"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed"),
]

# A mnemonic that starts with v, or a wide or mask register: AVX or later.
AVX = re.compile(r"\tv[a-z]|%[yz]mm|%k[0-7]")
AVX512 = re.compile(r"%zmm|%k[0-7]|%[xyz]mm(1[6-9]|2\d|3[01])\b")


def objdump(*arguments: str) -> str:
    assert zcomm._core.__file__ is not None
    command = ["objdump", *arguments, zcomm._core.__file__]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def source_files() -> dict[int, str]:
    """The file of each file-local function, by address. A FILE symbol precedes its functions."""
    files: dict[int, str] = {}
    current = ""
    for line in objdump("--syms").splitlines():
        match = re.match(r"([0-9a-f]{16}) (.{7}) (\S+)\t[0-9a-f]+ ?(.*)", line)
        if match and match[3] == "*ABS*" and "df" in match[2]:
            current = match[4].strip()
        elif match and match[3] == ".text" and match[2].startswith("l"):
            files[int(match[1], 16)] = current
    return files


def functions() -> Iterator[tuple[int, str, str]]:
    """The address, name and instructions of every function."""
    text = objdump("--disassemble", "--section=.text", "--no-show-raw-insn")
    parts = re.split(r"^([0-9a-f]{16}) <(.*)>:$", text, flags=re.MULTILINE)[1:]
    for address, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        yield int(address, 16), name, body


def test_only_the_files_of_an_instruction_set_use_it() -> None:
    files = source_files()
    if "avx2.cpp" not in files.values():
        pytest.skip("the module was stripped of its symbols")
    seen = set()
    for address, name, body in functions():
        file = files.get(address, "")
        seen.add(file)
        if file == "avx512.cpp":
            continue
        found = (AVX512 if file == "avx2.cpp" else AVX).search(body)
        assert not found, f"{name} of {file or 'several files'} holds {found[0]!r}"
    assert {"avx2.cpp", "avx512.cpp", "scalar.cpp"} <= seen


def test_each_instruction_set_is_used_by_its_file() -> None:
    files = source_files()
    if "avx2.cpp" not in files.values():
        pytest.skip("the module was stripped of its symbols")
    bodies = {"avx2.cpp": "", "avx512.cpp": ""}
    for address, _, body in functions():
        if files.get(address) in bodies:
            bodies[files[address]] += body
    assert "%ymm" in bodies["avx2.cpp"]
    assert "%zmm" in bodies["avx512.cpp"]
