"""The disk cache of compiled kernels: files are complete, built once, and failures are harmless."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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
    assert image_cache.cached(NAME, Maker()) == Maker().data  # the lock was released


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(image_cache.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    make = Maker()
    with pytest.warns(UserWarning, match="expected a folder for compiled kernels .* ZCOMM_CACHE_"):
        assert image_cache.cached(NAME, make) == make.data
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warned once already
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
    monkeypatch.setattr(os, "open", None)  # a cached file needs no lock
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


def test_a_user_without_a_home_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(image_cache.CACHE_VARIABLE)
    for variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # a user with no passwd entry
    make = Maker()
    with pytest.warns(UserWarning, match="home directory"):
        assert image_cache.cached(NAME, make) == make.data


def test_a_home_may_be_named_by_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(image_cache.CACHE_VARIABLE, "~/kernels")
    assert image_cache.folder() == tmp_path / "kernels"


def test_one_warning_for_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(image_cache.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="Not a directory") as caught:
        assert [image_cache.cached(f"{i}.image", Maker()) for i in range(3)] == [Maker().data] * 3
    assert len(caught) == 1


def test_a_child_forked_meanwhile_does_not_keep_the_lock() -> None:
    """A DataLoader may fork workers while another thread compiles."""
    children = []

    def make() -> bytes:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        children.append(child)
        return b"code"

    image_cache.cached(NAME, make)
    try:
        again = subprocess.run([sys.executable, "-c", _TAKE_LOCK, str(image_cache.folder())])
        assert again.returncode == 0
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


_TAKE_LOCK = """
import fcntl, pathlib, sys
(lock,) = pathlib.Path(sys.argv[1]).glob("*.lock")
fcntl.flock(lock.open("r+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
"""
