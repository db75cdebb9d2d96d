"""The installed package is the one that was built: wheel, metadata, native module, tables."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import zcomm
import zcomm._core
from zcomm.wire import lm_tables

ROOT = Path(__file__).resolve().parents[2]
# Set by `make test`: the wheel under test.
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
        name for name in names if name.startswith("zcomm/") and not name.endswith((".so", "/"))
    }
    assert packaged == {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("zcomm/**/*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    } | {f"zcomm/kernels/{path.relative_to(ROOT)}" for path in device_sources()}
    assert {"zcomm/py.typed", "zcomm/conformance/vectors/vectors.json"} <= packaged


def device_sources() -> set[Path]:
    """Everything that kernel files include, directly or not, and the options to compile them."""
    todo = [*(ROOT / "csrc/cuda").glob("*.cu")]
    found = {ROOT / "csrc/cuda/nvcc_options.txt", *todo}
    while todo:
        names = re.findall(r'#include "([^"]+)"', todo.pop().read_text())
        new = {ROOT / "csrc" / name for name in names if "simt" not in name} - found
        found |= new
        todo += new
    return found


@needs_wheel
def test_the_wheel_has_the_tag_that_auditwheel_finds() -> None:
    assert WHEEL is not None
    tag = re.search(r"-(manylinux_2_\d+_\w+|musllinux_1_\d+_\w+)\.whl$", WHEEL)
    assert tag is not None, WHEEL
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(ROOT / WHEEL)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert f'following platform tag: "{tag[1]}"' in " ".join(shown.split())


def test_metadata() -> None:
    metadata = importlib.metadata.metadata("zcomm")
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Requires-Python"] == ">=3.10"
    needed = metadata.get_all("Requires-Dist") or []
    assert [line for line in needed if "extra ==" not in line] == ["torch>=2.6"]
    frameworks = {"lightning", "transformers", "accelerate"}
    extras = {"bench", "cuda", "cupy", "triton", "dev", *frameworks}
    assert set(metadata.get_all("Provides-Extra") or []) == extras


def test_every_tool_of_dev_is_pinned() -> None:
    needed = importlib.metadata.requires("zcomm") or []
    tools = {line.split(";")[0].strip() for line in needed if 'extra == "dev"' in line}
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if not line.startswith("#")}
    assert pinned == tools | {"torch"}


@pytest.fixture(scope="module")
def clean_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel installed. It borrows our torch; nothing is downloaded."""
    assert WHEEL is not None
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-index", "--no-deps", str(ROOT / WHEEL)]
    subprocess.run(install, check=True)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    # Searched last, so that the environment's own zcomm wins.
    (site_packages / "lent.pth").write_text(sysconfig.get_paths()["platlib"] + "\n")
    return python


@needs_wheel
def test_the_wheel_passes_doctor_in_a_clean_environment(clean_python: Path, tmp_path: Path) -> None:
    env = {**os.environ, "COLUMNS": "200"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        [clean_python.parent / "zcomm", "doctor"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nready\n")
    assert f"in {clean_python.parent.parent}" in done.stdout
    assert list(tmp_path.iterdir()) == []


# Checks against the installed wheel, without the settings of the source tree.
@needs_wheel
def test_a_users_script_is_clean_under_mypy_strict(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text((ROOT / "tests" / "support" / "typed_training.py").read_text())
    # Shares version and cache with `make lint`: reading torch takes most of a minute, once.
    options = ["--strict", "--config-file=", "--python-version=3.10"]
    cache = f"--cache-dir={ROOT / '.mypy_cache'}"
    command = [sys.executable, "-m", "mypy", *options, cache, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


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
    # Weak and unique symbols (V, W, u) are templates of the C++ library.
    assert [name for _, kind, name in symbols if kind in "TDBR"] == ["PyInit__core"]


def test_import_loads_no_gpu_library() -> None:
    names = {"triton", "cupy", "cupy_backends", "zcomm._cuda", "zcomm.kernels.cupy"}
    code = f"import sys, zcomm; print(*sorted({names!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == ""


FRAMEWORKS = ("lightning", "transformers")


def test_import_loads_no_framework() -> None:
    names = {*FRAMEWORKS, "pytorch_lightning", "accelerate", "zcomm.integrations"}
    code = f"import sys, zcomm; print(*sorted({names!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == ""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_framework_that_is_absent_says_what_to_install(framework: str) -> None:
    with pytest.raises(ImportError, match=rf"use pip install 'zcomm\[{framework}\]'"):
        importlib.import_module(f"zcomm.integrations.{framework}")


def test_integrations_are_tested_with_the_same_torch() -> None:
    files = (ROOT / f"requirements-{name}.txt" for name in ("dev", "integrations"))
    dev, frameworks = (
        dict(line.split("==") for line in file.read_text().splitlines() if "==" in line)
        for file in files
    )
    shared = dev.keys() & frameworks.keys()
    assert shared == {"torch", "numpy", "pytest", "pytest-timeout", "hypothesis"}
    assert all(dev[name] == frameworks[name] for name in shared)


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
    """Each level is the mean of the Gaussian over its cell, rounded to bf16."""
    levels = lm_tables.LEVELS[bits]
    assert len(levels) == 2**bits
    assert list(levels) == [-q for q in reversed(levels)]
    ends = [t / lm_tables.STEPS for t in lm_tables.THRESHOLDS[bits]]
    edges = [0.0, *ends, math.inf]
    for level, lo, hi in zip(levels[2 ** (bits - 1) :], edges, edges[1:]):
        density = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in (lo, hi)]
        mass = (math.erfc(lo / math.sqrt(2)) - math.erfc(hi / math.sqrt(2))) / 2
        assert level == _bf16((density[0] - density[1]) / mass)
    # Cells end halfway between two levels, up to the rounding of both tables.
    for end, one, other in zip(ends, levels[2 ** (bits - 1) :], levels[2 ** (bits - 1) + 1 :]):
        assert abs(end - (one + other) / 2) <= 0.5 / lm_tables.STEPS + other * 2**-8
