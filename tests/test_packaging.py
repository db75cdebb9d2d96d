"""What is installed is what was built: the wheel, its metadata, its native module, its tables."""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import zcomm
import zcomm._core
from zcomm.codecs import lm_tables

ROOT = Path(__file__).resolve().parent.parent
# Set by `make test`: the wheel whose contents are under test.
WHEEL = os.environ.get("ZCOMM_WHEEL")

needs_wheel = pytest.mark.skipif(WHEEL is None, reason="run by `make test`, which sets ZCOMM_WHEEL")
needs_binutils = pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")


@needs_wheel
def test_the_wheel_is_what_the_tests_import() -> None:
    site_packages = Path(sysconfig.get_paths()["platlib"]).resolve()
    for module in (zcomm, zcomm._core):
        assert module.__file__ is not None
        assert site_packages in Path(module.__file__).resolve().parents


@needs_wheel
def test_the_wheel_holds_the_package_and_nothing_else() -> None:
    assert WHEEL is not None
    with zipfile.ZipFile(ROOT / WHEEL) as wheel:
        names = wheel.namelist()
    assert {name.split("/")[0] for name in names} == {
        "zcomm",
        f"zcomm-{zcomm.__version__}.dist-info",
    }
    packaged = {
        name
        for name in names
        if name.startswith("zcomm/") and name.endswith((".py", ".pyi", ".typed"))
    }
    assert packaged == {
        str(path.relative_to(ROOT))
        for suffix in ("py", "pyi", "typed")
        for path in ROOT.glob(f"zcomm/**/*.{suffix}")
    }
    assert "zcomm/py.typed" in packaged


def test_metadata() -> None:
    metadata = importlib.metadata.metadata("zcomm")
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata.get_all("Requires-Dist") == ["torch>=2.6"]


def test_versions_agree() -> None:
    changelog = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changelog is not None
    assert zcomm.__version__ == importlib.metadata.version("zcomm") == changelog[1]


def _nm(*options: str) -> str:
    command = ["nm", "-D", *options, zcomm._core.__file__]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@needs_binutils
def test_native_module_has_no_torch_symbol() -> None:
    symbols = _nm("--undefined-only") + _nm("--undefined-only", "--demangle")
    assert "Py" in symbols
    assert not re.findall(r".*(?:torch|c10|caffe2|\bat::|_ZN?K?2at|THP).*", symbols)


@needs_binutils
def test_native_module_exports_only_its_init_function() -> None:
    symbols = [line.split() for line in _nm("--defined-only").splitlines()]
    # Weak and unique symbols (V, W, u) are the C++ library's templates.
    assert [name for _, kind, name in symbols if kind in "TDBR"] == ["PyInit__core"]


def test_import_loads_no_gpu_library() -> None:
    code = "import sys, zcomm; print(*sorted({'triton', 'cupy', 'zcomm._cuda'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == ""


def test_checked_in_tables_are_what_the_script_computes() -> None:
    script = ROOT / "tools" / "make_tables.py"
    result = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def _bf16(x: float) -> float:
    u = struct.unpack("<I", struct.pack("<f", x))[0]
    rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16 << 16
    return float(struct.unpack("<f", struct.pack("<I", rounded))[0])


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_levels_are_a_lloyd_max_quantiser(bits: int) -> None:
    """Each level is the Gaussian's mean over its cell, rounded to bf16."""
    levels = lm_tables.LEVELS[bits]
    assert len(levels) == 2**bits
    assert list(levels) == [-q for q in reversed(levels)]
    ends = [t / lm_tables.STEPS for t in lm_tables.THRESHOLDS[bits]]
    edges = [0.0, *ends, math.inf]
    for level, lo, hi in zip(levels[2 ** (bits - 1) :], edges, edges[1:]):
        density = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in (lo, hi)]
        mass = (math.erfc(lo / math.sqrt(2)) - math.erfc(hi / math.sqrt(2))) / 2
        assert level == _bf16((density[0] - density[1]) / mass)
    # The cells end half way between two levels, to the rounding of both tables.
    for end, one, other in zip(ends, levels[2 ** (bits - 1) :], levels[2 ** (bits - 1) + 1 :]):
        assert abs(end - (one + other) / 2) <= 0.5 / lm_tables.STEPS + other * 2**-8
