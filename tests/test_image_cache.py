"""Compiled kernels on disk: whole or not at all, made once, and never in the way."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import emulated_driver
from zcomm.kernels import image_cache

PROCESSES = 3
NAME = "one_0_sm_80_key.image"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(image_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    image_cache._warn.cache_clear()
    return tmp_path / "cache"


class Maker:
    def __init__(self, data: bytes = b"machine code" * 1000) -> None:
        self.data, self.times = data, 0

    def __call__(self) -> bytes:
        self.times += 1
        return self.data


def test_it_is_made_once(folder: Path) -> None:
    make = Maker()
    assert [image_cache.cached(NAME, make) for _ in range(3)] == [make.data] * 3
    assert make.times == 1
    assert (folder / NAME).read_bytes().endswith(make.data)
    assert {path.name for path in folder.iterdir()} == {NAME, "one_0_sm_80_key.lock"}


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "digest only"])
def test_a_damaged_file_is_made_anew(damage: str, folder: Path) -> None:
    make = Maker()
    image_cache.cached(NAME, make)
    whole = bytearray((folder / NAME).read_bytes())
    if damage == "flipped":
        whole[500] ^= 1
    length = {"cut": len(whole) - 1, "flipped": len(whole), "empty": 0, "digest only": 32}[damage]
    (folder / NAME).write_bytes(whole[:length])
    assert image_cache.cached(NAME, make) == make.data
    assert make.times == 2
    assert image_cache.cached(NAME, make) == make.data
    assert make.times == 2


def test_an_error_while_it_is_made_leaves_nothing(folder: Path) -> None:
    def fail() -> bytes:
        raise RuntimeError("does not compile")

    with pytest.raises(RuntimeError, match="does not compile"):
        image_cache.cached(NAME, fail)
    assert not (folder / NAME).exists()
    assert image_cache.cached(NAME, Maker()) == Maker().data  # the lock was given back


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(image_cache.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    make = Maker()
    with pytest.warns(UserWarning, match="expected a folder for compiled kernels .* ZCOMM_CACHE_"):
        assert image_cache.cached(NAME, make) == make.data
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert image_cache.cached(NAME, make) == make.data
    assert make.times == 2


def test_a_disk_that_is_full_is_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    make = Maker()
    with pytest.warns(UserWarning, match="No space left on device"):
        assert image_cache.cached(NAME, make) == make.data
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


def test_a_folder_that_may_only_be_read_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Maker()
    image_cache.cached(NAME, make)
    monkeypatch.setattr(os, "open", None)  # no lock is taken for what is there
    assert image_cache.cached(NAME, make) == make.data
    assert make.times == 1


def test_the_folder_is_that_of_the_users_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(image_cache.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert image_cache.folder() == Path("/caches/zcomm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert image_cache.folder() == Path("/home/somebody/.cache/zcomm")


RANK = """
import hashlib, sys, time
from pathlib import Path
from zcomm.kernels import nvrtc

compiled, times = nvrtc.compiled, []
def counted(unit, target):
    times.append(unit)
    return compiled(unit, target)
nvrtc.compiled = counted
nvrtc.version()
go = Path(sys.argv[1])
print("ready", flush=True)
while not go.exists():
    time.sleep(0.001)
image = nvrtc.image(nvrtc.Unit("none", 0), "sm_80")
assert image.startswith(b"\\x7fELF")
print(len(times), hashlib.sha256(image).hexdigest())
"""


@pytest.mark.skipif(bool(emulated_driver.absent()), reason=emulated_driver.absent())
def test_of_ranks_that_start_together_one_compiles(folder: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", RANK, str(go)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(PROCESSES)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    go.touch()
    said = [rank.communicate(timeout=240)[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * PROCESSES
    assert sorted(times for times, _ in said) == ["0"] * (PROCESSES - 1) + ["1"]
    assert len({digest for _, digest in said}) == 1
    assert sorted(path.suffix for path in folder.iterdir()) == [".image", ".lock"]
