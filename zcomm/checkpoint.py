"""Checkpoints on disk, saved atomically.

A folder holds one directory for each checkpoint, written by torch.distributed.checkpoint, and a
file `latest` with the name of the newest complete one. A save writes to a new directory and then
replaces `latest` atomically. Whenever a process is killed, `latest` names a complete checkpoint.
"""

import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from zcomm.base import arguments
from zcomm.torch_private.c10d import default_store
from zcomm.transport.channels import group_of, group_timeout_s, member_of
from zcomm.transport.handshake import Caller
from zcomm.zero.optimizer import ZeroOptimizer

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
    "optimizer": opt, "epoch": {"number": 3}}. The `keep` newest checkpoints stay. `group` is the
    model's: over one dimension of a mesh, mesh["dp"], with a folder for each of its groups.
    """
    step, keep = arguments.count(step, "a step"), arguments.count(keep, "keep", least=1)
    rank, group = _prepare("save_checkpoint", state, group)
    root = Path(folder)
    unfinished = root / f"{_UNFINISHED}{step}"
    _expect_own_folder(_on_rank_0(lambda: _claim(root, group), rank, group), root)
    _on_rank_0(lambda: _make_folder(root), rank, group)
    _dcp().save(dict(state), checkpoint_id=unfinished, process_group=group)
    _on_rank_0(lambda: _publish(root, unfinished, step, keep), rank, group)


def load_checkpoint(
    folder: str | os.PathLike[str], state: MutableMapping[str, Any], *, group: Any = None
) -> int | None:
    """Loads the newest checkpoint into `state`; returns its step, or None if there is none.

    All ranks call it, in a world of any size.
    """
    rank, group = _prepare("load_checkpoint", state, group)
    root = Path(folder)
    name = _on_rank_0(lambda: _latest(root), rank, group)
    if not name:
        return None
    path = root / name
    for key, value in state.items():
        if isinstance(value, ZeroOptimizer):
            saved: dict[str, Any] = {key: {"about": "", "param_groups": ()}}
            _dcp().load(saved, checkpoint_id=path, process_group=group)
            value.expect_fit(saved[key])
    _dcp().load(state, checkpoint_id=path, process_group=group)
    return int(name.removeprefix(_PREFIX).split(".")[0])


def _prepare(what: str, state: Mapping[str, Any], group: Any) -> tuple[int, Any]:
    """This rank in the group, and the group; refuses a state that would not be complete."""
    group = group_of(group, what)
    rank, _ = member_of(group, what)
    for optimizer in state.values():
        if isinstance(optimizer, ZeroOptimizer):
            _expect_own_group(what, optimizer, _ranks(group))
            _expect_whole_models(what, optimizer, state.values())
    try:
        importlib.import_module("numpy")
    except ImportError as error:
        raise RuntimeError(
            f"{what}: expected NumPy, which torch.distributed.checkpoint needs, got none; "
            "use pip install numpy"
        ) from error
    return rank, group


def _expect_own_group(what: str, optimizer: ZeroOptimizer, ranks: list[int]) -> None:
    """Refuses another group: models of other groups name their shards alike, and one gets lost."""
    own = _ranks(optimizer.compressor.group)
    if own != ranks:
        raise ValueError(
            f"rank {dist.get_rank()}: {what}: expected group= that of the optimizer's model, ranks "
            f"{own}, got ranks {ranks}; over one dimension of a mesh use group=mesh['dp'], and a "
            "folder for each of its groups"
        )


def _expect_whole_models(what: str, optimizer: ZeroOptimizer, values: Iterable[Any]) -> None:
    """Refuses a model without some of its optimizer's parameters."""
    ddp = optimizer.compressor.ddp()
    for model in values:
        if isinstance(model, nn.Module) and ddp is not None and model in (ddp, ddp.module):
            named = {id(p) for p in model.parameters()}
            lost = [s.name for s in optimizer.shards.values() if id(s.parameter) not in named]
            if lost:
                raise ValueError(
                    f"{what}: expected a model that has all parameters of its optimizer, got one "
                    f"without {lost[0]!r}: torch takes tensor-parallel parameters out of it in the "
                    "first forward pass; put dict(model.named_parameters()), made before that, in "
                    "place of the model"
                )


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def _claim(root: Path, group: Any) -> list[int] | None:
    """Claims a folder for a group; returns the ranks of a disjoint group that has it already."""
    store = default_store()
    key, mine = f"zcomm/checkpoints/{root.resolve()}", _ranks(group)
    found: list[int] = json.loads(store.compare_set(key, "", json.dumps(mine)))
    if set(found).isdisjoint(mine):
        return found
    store.set(key, json.dumps(mine))
    return None


def _expect_own_folder(others: list[int] | None, root: Path) -> None:
    if others:
        raise ValueError(
            f"rank {dist.get_rank()}: save_checkpoint: expected a folder of its own for each "
            f"group, got {str(root)!r}, to which ranks {others} save; add to its name, such as "
            "f'{folder}/tp{mesh.get_local_rank(\"tp\")}'"
        )


def _on_rank_0(work: Callable[[], Any], rank: int, group: Any) -> Any:
    """Runs `work` on rank 0; all ranks return its result, or raise its error instead of waiting."""
    done: tuple[Any, str] = None, ""
    if rank == 0:
        try:
            done = work(), ""
        except OSError as error:
            done = None, f"{type(error).__name__}: {error}"
    caller = Caller("a checkpoint", group, group_timeout_s(group))
    result, failure = caller.gather_json(done)[0]
    if failure:
        raise OSError(f"rank {rank}: checkpoint: rank 0 failed: {failure}")
    return result


def _dcp() -> Any:
    """torch.distributed.checkpoint, imported when needed: it takes a second."""
    return importlib.import_module("torch.distributed.checkpoint")


def _latest(root: Path) -> str:
    try:
        return (root / _LATEST).read_text().strip()
    except FileNotFoundError:
        return ""


def _make_folder(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{_UNFINISHED}*"):  # from a save that was killed
        shutil.rmtree(left)


def _publish(root: Path, unfinished: Path, step: int, keep: int) -> None:
    """Gives a complete checkpoint its name, then makes it the latest."""
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


def _drop_old(root: Path, newest: str, keep: int) -> None:
    """Keeps the last `keep` that were written; steps may have started again from 0."""
    older = [path for path in root.glob(f"{_PREFIX}*") if path.name != newest]
    older.sort(key=lambda path: path.stat().st_mtime_ns)
    for path in older[: max(0, len(older) - (keep - 1))]:
        shutil.rmtree(path)
