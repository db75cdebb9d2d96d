"""What is on disk: a directory for each checkpoint, and `latest`, the name of the newest.

torch.distributed.checkpoint writes the directories: a file for each rank, and `.metadata`, which
says what is in them. A save writes to a new directory, renames it when it is whole, and replaces
`latest`. Whenever a process is killed, `latest` names a whole checkpoint.
"""

import hashlib
import importlib
import os
import pickle
import secrets
import shutil
from itertools import count
from pathlib import Path
from typing import Any

from zcomm.checkpoint.agreement import waited_for

_LATEST, _TOKEN, _METADATA = "latest", "token", ".metadata"
_PREFIX, _UNFINISHED = "step-", ".unfinished-"
# What reading a file of pickles raises when it is missing, cut off or something else.
_UNREADABLE = (
    OSError,
    EOFError,
    pickle.UnpicklingError,
    AttributeError,
    ImportError,
    IndexError,
    ValueError,
)


def dcp() -> Any:
    """torch.distributed.checkpoint, imported when needed: it takes a second."""
    return importlib.import_module("torch.distributed.checkpoint")


def latest(root: Path) -> str:
    """The name of the newest checkpoint, or ""."""
    try:
        return (root / _LATEST).read_text().strip()
    except FileNotFoundError:
        return ""


def step_of(name: str) -> int:
    return int(name.removeprefix(_PREFIX).split(".")[0])


def unfinished(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is written."""
    return root / f"{_UNFINISHED}{step}"


# Saving.


def begin(new: Path) -> str:
    """Makes the directory of a new checkpoint with a random token in it; returns the token."""
    new.parent.mkdir(parents=True, exist_ok=True)
    for left in new.parent.glob(f"{_UNFINISHED}*"):  # from a save that was killed
        shutil.rmtree(left)
    new.mkdir()
    token = secrets.token_hex(16)
    (new / _TOKEN).write_text(token)
    return token


def lacks_token(new: Path, token: str) -> str:
    """Why this is not the directory that rank 0 made; "" if it is."""
    try:
        found = (new / _TOKEN).read_text()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return "" if found == token else f"another token in {str(new)!r}"


def give_up(root: Path) -> None:
    """Removes what was not finished, from the disk that this rank sees."""
    for left in root.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)  # other ranks may be removing the same files


def publish(new: Path, step: int, token: str, wait_s: float) -> str:
    """Makes a whole checkpoint the latest; returns what one that is not whole lacks."""
    lost = waited_for(lambda: lacks_token(new, token) or lacks(new), wait_s)
    if lost:
        return lost
    root = new.parent
    name = _unused_name(root, step)
    new.rename(root / name)
    _sync(root)
    pointer = root / f"{_LATEST}.new"
    with pointer.open("w") as file:
        file.write(name)
        file.flush()
        os.fsync(file.fileno())
    pointer.replace(root / _LATEST)
    _sync(root)
    return ""


def _unused_name(root: Path, step: int) -> str:
    """A name for the step's checkpoint. After a restart a step may be saved a second time."""
    names = (f"{_PREFIX}{step:09d}.{attempt}" for attempt in count())
    return next(name for name in names if not (root / name).exists())


def _sync(root: Path) -> None:
    """Flushes the names in a directory to disk."""
    directory = os.open(root, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def drop_old(root: Path, keep: int) -> None:
    """Keeps the last `keep` that were written; steps may have started again from 0.

    One that is not whole does not count, and goes with those that are older than the last kept.
    """
    newest = latest(root)
    older = [path for path in root.glob(f"{_PREFIX}*") if path.name != newest]
    older.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    kept = 1
    for path in older:
        if kept < keep:
            kept += not lacks(path)
        else:
            shutil.rmtree(path)


# How much of a checkpoint there is.


def lacks(path: Path) -> str:
    """The first thing that a checkpoint lacks; "" if it is whole, as far as this rank sees."""
    try:
        with os.scandir(path) as entries:  # makes NFS look at the server's directory again
            sizes = {entry.name: entry.stat().st_size for entry in entries}
        planned = _planned_sizes(path)
    except _UNREADABLE as error:
        return f"{type(error).__name__}: {error}"
    for name, size in planned.items():
        if name not in sizes:
            return f"no file {str(path / name)!r}"
        if sizes[name] < size:
            return f"{sizes[name]} of {size} bytes in {str(path / name)!r}"
    return ""


def _planned_sizes(path: Path) -> dict[str, int]:
    """The files that the ranks wrote, by name, and their sizes, as each rank reported its own."""
    sizes: dict[str, int] = {}
    for part in dcp().FileSystemReader(path).read_metadata().storage_data.values():
        end = part.offset + part.length
        sizes[part.relative_path] = max(end, sizes.get(part.relative_path, 0))
    return sizes


def differs(path: Path) -> str:
    """Why `path` is not the latest checkpoint, or not whole; "" if it is both."""
    try:
        name = latest(path.parent)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    if name != path.name:
        return f"{name or 'nothing'} is the latest in {str(path.parent)!r}"
    return lacks(path)


def fingerprint(path: Path) -> str:
    """Tells a checkpoint from any other of the same name."""
    files = [path / _TOKEN, path / _METADATA]  # checkpoints of older versions have no token
    return hashlib.sha256(b"".join(f.read_bytes() for f in files if f.exists())).hexdigest()
