"""NVRTC compiles the kernels in the wheel: every file, for every architecture."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import emulated_driver
from zcomm import _core
from zcomm.kernels import nvrtc
from zcomm.kernels.nvrtc import Unit

ROOT = Path(__file__).resolve().parents[2]
# `make gpu-proof` covers more.
ARCHS = os.environ.get("ZCOMM_NVRTC_ARCHS", "90").split(",")

needs_nvrtc = pytest.mark.skipif(bool(emulated_driver.absent()), reason=emulated_driver.absent())


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("unit", emulated_driver.UNITS, ids=lambda unit: f"{unit.file}_{unit.rows}")
def test_every_kernel_compiles_to_machine_code(unit: Unit, arch: str) -> None:
    cubin = nvrtc.image(unit, f"sm_{arch}")
    assert cubin.startswith(b"\x7fELF")
    symbols = [symbol for symbol, file, rows in _core.KERNELS if (file, rows) == unit]
    assert symbols
    for symbol in symbols:
        assert f".text.{symbol}\0".encode() in cubin


def test_units_are_the_kernel_files() -> None:
    files = {path.stem for path in (ROOT / "csrc" / "cuda").glob("*.cu")}
    assert {unit.file for unit in emulated_driver.UNITS} == files
    assert {unit.file for unit in emulated_driver.DEFAULT_UNITS} == files


def test_the_wheel_has_the_sources_that_it_was_built_from() -> None:
    """Everything that kernels include, and the options, but no host code."""
    shipped = {path.relative_to(nvrtc.SOURCES) for path in nvrtc.SOURCES.rglob("*.*")}
    for path in shipped:
        assert (nvrtc.SOURCES / path).read_bytes() == (ROOT / "csrc" / path).read_bytes()
    of_kernels = [*(ROOT / "csrc" / "cuda").glob("*.cu"), *(ROOT / "csrc" / "codec").glob("*.h")]
    assert {path.relative_to(ROOT / "csrc") for path in of_kernels} < shipped
    assert Path("cuda/nvcc_options.txt") in shipped
    assert not {Path(f"cuda/{name}.h") for name in ("plan", "driver", "bind_device")} & shipped


def test_options_are_those_of_nvcc() -> None:
    assert nvrtc._options(Unit("none", 0)) == ("-std=c++17", "--fmad=false")
    assert nvrtc._options(Unit("lm4", 8)) == ("-std=c++17", "--fmad=false", "-DZC_ROWS=8")


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 9), "sm_86"),  # the newest in its major version that NVRTC supports
        ((10, 3), "sm_100"),
        ((12, 0), "sm_120"),
        ((13, 0), "compute_120"),  # PTX, which the driver compiles
        ((9, 9), "sm_90"),
    ],
)
def test_targets(capability: tuple[int, int], target: str) -> None:
    assert nvrtc.target_for(capability, (75, 80, 86, 90, 100, 120)) == target


@needs_nvrtc
def test_a_gpu_that_is_too_old_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"capability 7\.5 or later, .* has 6\.1; use an older"):
        nvrtc.target_for((6, 1), (75, 80))


@needs_nvrtc
def test_what_does_not_compile_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(nvrtc.SOURCES, tmp_path / "csrc")
    (tmp_path / "csrc" / "cuda" / "none.cu").write_text("no CUDA")
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path / "csrc")
    with pytest.raises(RuntimeError, match=r"compile none\.cu for sm_80, got (.|\n)*none\.cu\(1\)"):
        nvrtc.compiled(Unit("none", 0), "sm_80")


@needs_nvrtc
def test_the_key_is_of_all_that_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit("int8", 1)
    keys = {nvrtc._key(unit, "sm_80"), nvrtc._key(unit, "sm_90")}
    keys |= {nvrtc._key(Unit("int8", 2), "sm_80"), nvrtc._key(Unit("int4", 1), "sm_80")}
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 1))
    keys.add(nvrtc._key(unit, "sm_80"))
    monkeypatch.undo()
    shutil.copytree(nvrtc.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path / "csrc")
    for name, text in (("codec/int8.h", "// more\n"), ("cuda/nvcc_options.txt", "-DMORE\n")):
        with open(tmp_path / "csrc" / name, "a") as file:
            file.write(text)
        nvrtc._headers.cache_clear()
        keys.add(nvrtc._key(unit, "sm_80"))
    nvrtc._headers.cache_clear()
    assert len(keys) == 7


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: None)
    assert nvrtc.missing().startswith("CuPy is not installed; pip install 'zcomm[cupy]', or ")


def test_without_nvrtc_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy is installed, but its binding finds no library."""

    def lost() -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.13: no such file\nand more")

    monkeypatch.setattr(nvrtc, "version", lost)
    nvrtc.missing_library.cache_clear()
    found = nvrtc.missing_library()
    nvrtc.missing_library.cache_clear()
    assert found.startswith("NVRTC cannot be loaded (CuPy failed to load libnvrtc.so.13: no such")
    assert "pip install nvidia-cuda-nvrtc" in found


def test_sources_that_are_lost_are_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path / "csrc")
    assert (
        nvrtc.missing() == f"the kernels' sources are not in {tmp_path}; install zcomm as a wheel"
    )
