"""A disk cache of compiled kernels: they take seconds to build, and every rank needs them.

A file holds the SHA-256 of its contents, then the contents; it is renamed into place once complete.
If several processes need the same file, one builds it while the others wait. Without a writable
cache, each process builds its own.
"""

import fcntl
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

CACHE_VARIABLE = "ZCOMM_CACHE_DIR"
_DIGEST_NBYTES = 32


def folder() -> Path:
    """ZCOMM_CACHE_DIR, or else zcomm's folder in the user's cache directory."""
    told = os.environ.get(CACHE_VARIABLE)
    if told:
        return Path(told).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME")
    return Path(caches or Path.home() / ".cache", "zcomm")


def cached(name: str, make: Callable[[], bytes]) -> bytes:
    """The contents of a cached file; builds them if it is missing or damaged."""
    try:
        path = folder() / name
    except RuntimeError as error:  # a user without a home directory
        _warn("none", str(error))
        return make()
    found = _read(path)
    if found is not None:
        return found
    try:
        lock = _lock(path.with_suffix(".lock"))
    except OSError as error:
        _warn(str(path.parent), error.strerror)
        return make()
    try:
        found = _read(path)
        if found is None:
            found = make()
            _write(path, found)
        return found
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a child forked meanwhile also has the file open
        os.close(lock)


def _read(path: Path) -> bytes | None:
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    digest, data = whole[:_DIGEST_NBYTES], whole[_DIGEST_NBYTES:]
    return data if hashlib.sha256(data).digest() == digest else None


def _write(path: Path, data: bytes) -> None:
    try:
        with _replacement(path) as file:
            file.write(hashlib.sha256(data).digest() + data)
    except OSError as error:  # a full disk
        _warn(str(path.parent), error.strerror)


@contextmanager
def _replacement(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that replaces `path` once written; deleted on failure."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _lock(path: Path) -> int:
    """Waits until no other process holds the lock."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        os.close(file)
        raise
    return file


@lru_cache(maxsize=8)
def _warn(where: str, why: str) -> None:
    warnings.warn(
        f"zcomm: expected a folder for compiled kernels that can be written, got {where} ({why}); "
        f"each process compiles its own, which takes seconds. Set {CACHE_VARIABLE}",
        stacklevel=2,
    )
