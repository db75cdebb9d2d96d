"""Checkpoints on disk: whole or not there.

A folder holds one directory for each checkpoint, written by torch.distributed.checkpoint, and a
file `latest` with the name of the newest that is whole. A save writes to a directory of its own,
and only then replaces `latest`, at once. Whatever is killed when: `latest` names a whole one.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, MutableMapping
from itertools import count
from pathlib import Path
from typing import Any

from zcomm import arguments
from zcomm.transport import gather_bytes, member_of
from zcomm.zero import ShardedOptimizer
from zcomm.zero_state import checked_about

_LATEST = "latest"
_PREFIX, _UNFINISHED = "step-", ".unfinished-"


def save_checkpoint(
    folder: str | os.PathLike[str],
    state: Mapping[str, Any],
    step: int,
    *,
    keep: int = 2,
    group: Any = None,
) -> None:
    """Saves `state` as the newest checkpoint in `folder`, which all ranks must be able to see.

    All ranks call it. `state` is what torch.distributed.checkpoint takes: {"model": model,
    "optimizer": opt, "epoch": {"number": 3}}. The `keep` newest checkpoints stay.
    """
    step, keep = arguments.count(step, "a step"), arguments.count(keep, "keep", least=1)
    rank = _prepare("save_checkpoint", group)
    root = Path(folder)
    unfinished = root / f"{_UNFINISHED}{step}"
    _on_rank_0(lambda: _make_folder(root), rank, group)
    _dcp().save(dict(state), checkpoint_id=unfinished, process_group=group)
    _on_rank_0(lambda: _publish(root, unfinished, step, keep), rank, group)


def load_checkpoint(
    folder: str | os.PathLike[str], state: MutableMapping[str, Any], *, group: Any = None
) -> int | None:
    """Loads the newest checkpoint into `state`; returns its step, or None if there is none.

    All ranks call it, in a world of any size.
    """
    rank = _prepare("load_checkpoint", group)
    root = Path(folder)
    name = _on_rank_0(lambda: _latest(root), rank, group)
    if not name:
        return None
    path = root / name
    for key, value in state.items():
        if isinstance(value, ShardedOptimizer):
            saved: dict[str, Any] = {key: {"about": "", "param_groups": ()}}
            _dcp().load(saved, checkpoint_id=path, process_group=group)
            checked_about(value, saved[key])
    _dcp().load(state, checkpoint_id=path, process_group=group)
    return int(name.removeprefix(_PREFIX).split(".")[0])


def _prepare(what: str, group: Any) -> int:
    rank, _ = member_of(group, what)
    try:
        importlib.import_module("numpy")
    except ImportError as error:
        raise RuntimeError(
            f"{what}: expected NumPy, which torch.distributed.checkpoint needs, got none; "
            "use pip install numpy"
        ) from error
    return rank


def _on_rank_0(work: Callable[[], str], rank: int, group: Any) -> str:
    """What it returned there, on all ranks; its error, too: nobody waits for a rank that failed."""
    done: tuple[str, str] = "", ""
    if rank == 0:
        try:
            done = work(), ""
        except OSError as error:
            done = "", f"{type(error).__name__}: {error}"
    result, failure = json.loads(gather_bytes(json.dumps(done).encode(), group)[0])
    if failure:
        raise OSError(f"rank {rank}: checkpoint: rank 0 failed: {failure}")
    return str(result)


def _dcp() -> Any:
    """Imported when needed: it takes a second."""
    return importlib.import_module("torch.distributed.checkpoint")


def _latest(root: Path) -> str:
    try:
        return (root / _LATEST).read_text().strip()
    except FileNotFoundError:
        return ""


def _make_folder(root: Path) -> str:
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{_UNFINISHED}*"):  # of a save that was killed
        shutil.rmtree(left)
    return ""


def _publish(root: Path, unfinished: Path, step: int, keep: int) -> str:
    """Gives a whole checkpoint its name, then makes it the latest."""
    name = _unused_name(root, step)
    unfinished.rename(root / name)
    _sync(root)
    pointer = root / f"{_LATEST}.new"
    with pointer.open("w") as file:
        file.write(name)
        file.flush()
        os.fsync(file.fileno())
    pointer.replace(root / _LATEST)
    _sync(root)
    _drop_old(root, name, keep)
    return name


def _unused_name(root: Path, step: int) -> str:
    """Of the step; after a restart it may be saved a second time, beside the first."""
    names = (f"{_PREFIX}{step:09d}.{attempt}" for attempt in count())
    return next(name for name in names if not (root / name).exists())


def _sync(root: Path) -> None:
    """Has the names in a directory on the disk, too."""
    directory = os.open(root, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _drop_old(root: Path, newest: str, keep: int) -> None:
    """All but the newest `keep`, as they were written; steps may have started again from 0."""
    older = [path for path in root.glob(f"{_PREFIX}*") if path.name != newest]
    older.sort(key=lambda path: path.stat().st_mtime_ns)
    for path in older[: max(0, len(older) - (keep - 1))]:
        shutil.rmtree(path)
