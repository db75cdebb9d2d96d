"""`save_checkpoint` and `load_checkpoint`: every rank sees the same files, or every rank fails."""

import math
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zcomm.base import arguments
from zcomm.checkpoint import folder as disk
from zcomm.checkpoint.agreement import Seen, everyone_sees, named, on_every_rank, on_rank_0
from zcomm.checkpoint.state_checks import checked_caller, expect_one_save
from zcomm.transport.channels import group_of
from zcomm.transport.handshake import Caller, tells_others
from zcomm.zero.optimizer import ZeroOptimizer


def _group_of_call(*_: Any, group: Any = None, **__: Any) -> Any:
    """The group whose ranks make a call; None if there is none yet."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return group_of(group, "checkpoint") or dist.group.WORLD


@tells_others("save_checkpoint", _group_of_call)
def save_checkpoint(
    folder: str | os.PathLike[str],
    state: Mapping[str, Any],
    step: int,
    *,
    keep: int = 2,
    wait_s: float = 10.0,
    group: Any = None,
) -> None:
    """Saves `state` as the newest checkpoint in `folder`, which all ranks must share.

    All ranks call it. `state` is what torch.distributed.checkpoint takes: {"model": model,
    "optimizer": opt, "epoch": {"number": 3}}. The `keep` newest checkpoints stay. `wait_s` is how
    long a rank waits for files that a network file system shows late. `group` is the model's: over
    one dimension of a mesh, mesh["dp"], with a folder for each of its groups.

    1. Rank 0 makes a directory with a random token in it, and every rank reads the token.
    2. Every rank writes its part.
    3. Rank 0 looks whether all files are there, and makes the directory the latest checkpoint.
    """
    step, keep = arguments.count(step, "a step"), arguments.count(keep, "keep", least=1)
    _expect_seconds(wait_s)
    caller = checked_caller("save_checkpoint", state, group)
    root = Path(folder)
    new = disk.unfinished(root, step)
    expect_one_save(root, step, caller)
    caller = caller._replace(timeout_s=caller.timeout_s + wait_s)
    token = on_rank_0(lambda: disk.begin(new), caller)
    seen = everyone_sees(lambda: disk.lacks_token(new, token), wait_s, caller)
    _expect_shared(root, seen, caller)
    try:
        disk.dcp().save(dict(state), checkpoint_id=new, process_group=caller.group)
    except BaseException:
        disk.give_up(root)
        raise
    lost = on_rank_0(lambda: disk.publish(new, step, token, wait_s), caller)
    _expect_nothing_lost(root, lost, caller)
    if dist.get_rank(caller.group) == 0:  # nobody waits for this: it can take long
        disk.drop_old(root, keep)


@tells_others("load_checkpoint", _group_of_call)
def load_checkpoint(
    folder: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    *,
    wait_s: float = 10.0,
    group: Any = None,
) -> int | None:
    """Loads the newest checkpoint into `state`; returns its step, or None if there is none.

    All ranks call it, in a world of any size, and must see the same checkpoint. `wait_s` is how
    long a rank waits for files that a network file system shows late.
    """
    _expect_seconds(wait_s)
    caller = checked_caller("load_checkpoint", state, group)
    root = Path(folder)
    names = on_every_rank(lambda: disk.latest(root), caller)
    name = next(filter(None, names), "")
    if not name:
        return None
    path = root / name
    caller = caller._replace(timeout_s=caller.timeout_s + wait_s)
    seen = everyone_sees(lambda: disk.differs(path), wait_s, caller)
    _expect_same(path, names.index(name), seen, caller)
    for key, value in state.items():
        if isinstance(value, ZeroOptimizer):
            saved: dict[str, Any] = {key: {"about": "", "param_groups": ()}}
            disk.dcp().load(saved, checkpoint_id=path, process_group=caller.group)
            value.expect_fit(saved[key])
    disk.dcp().load(state, checkpoint_id=path, process_group=caller.group)
    return disk.step_of(name)


def _expect_seconds(wait_s: object) -> None:
    number = isinstance(wait_s, (int, float)) and not isinstance(wait_s, bool)
    if not number or not 0 <= wait_s < math.inf:  # type: ignore[operator]
        raise ValueError(f"wait_s: expected seconds, 0 or more, got {arguments.describe(wait_s)}")


def _expect_shared(root: Path, everyone: list[Seen], caller: Caller) -> None:
    """Refuses to write where some rank does not see rank 0's token."""
    blind = [seen for seen in everyone if seen.problem]
    if not blind:
        return
    on_every_rank(lambda: disk.give_up(root), caller)
    raise ValueError(
        f"rank {dist.get_rank()}: save_checkpoint: expected a folder that all ranks share, got "
        f"{str(root)!r}, where {named(blind)} cannot see what {named(everyone[:1])} wrote "
        f"({blind[0].problem}); nothing was saved; use a folder on a shared file system, or "
        "torch.distributed.checkpoint.save where something else joins the ranks' folders, as Ray "
        "does"
    )


def _expect_nothing_lost(root: Path, lost: str, caller: Caller) -> None:
    """Refuses to go on without a file that some rank wrote."""
    if lost:
        on_every_rank(lambda: disk.give_up(root), caller)
        raise RuntimeError(
            f"rank {dist.get_rank()}: save_checkpoint: expected the files of all ranks in "
            f"{str(root)!r}, got {lost}, as rank 0 sees it; nothing was saved, and the latest "
            "checkpoint is still the one before; check the disk, and that no other run saves there"
        )


def _expect_same(path: Path, source: int, everyone: list[Seen], caller: Caller) -> None:
    """Refuses to load where some rank does not see all of the checkpoint that `source` sees."""
    different = [seen for seen in everyone if seen.problem]
    if not different:
        prints = on_every_rank(lambda: disk.fingerprint(path), caller)
        different = [
            seen._replace(problem=f"another checkpoint is called {path.name!r}")
            for seen, its in zip(everyone, prints)
            if its != prints[source]
        ]
    if different:
        raise ValueError(
            f"rank {dist.get_rank()}: load_checkpoint: expected all ranks to see all of "
            f"{path.name!r}, the latest checkpoint on {named(everyone[source : source + 1])}, got "
            f"something else on {named(different)} ({different[0].problem}); use a folder on a "
            "shared file system; if files are lost, put the name of an older checkpoint in the "
            "file 'latest'"
        )
