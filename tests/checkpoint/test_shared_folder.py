"""A checkpoint that not all ranks can see is refused by all of them, and nothing else is lost."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from ddp_training import assert_bit_equal
from raised import Raised, raised
from ranks import World
from zcomm.checkpoint.agreement import Seen, named
from zcomm.sharding.checkpoint_tensors import StateShard
from zero_checkpoints import BOTH_WAYS, Training

pytest_plugins = ["ddp_ranks", "zero_ranks"]

HOST = socket.gethostname()
SOON_S = 0.3  # instead of the 10 s that ranks wait for files that show late
WITHIN_S = 8.0  # of a refusal, on a busy machine; a group's timeout is 120 s
LATE_S = 1.0


def part(rank: int, world_size: int, value: float, kind: Any = StateShard) -> dict[str, Any]:
    """A state of which each rank has a file."""
    return {"parts": {"part": kind.of(torch.full((8,), value), 8 * rank, 8 * world_size)}}


def save(rank: int, world_size: int, folder: Path, step: int, **options: Any) -> None:
    zcomm.save_checkpoint(folder, part(rank, world_size, step), step, **options)


def load(rank: int, world_size: int, folder: Path, **options: Any) -> int | None:
    """The step; what was loaded is what that step saved."""
    state = part(rank, world_size, -1.0)
    step = zcomm.load_checkpoint(folder, state, **options)
    assert step is None or torch.equal(state["parts"]["part"].part(), torch.full((8,), step * 1.0))
    return step


def contents(folder: Path) -> dict[str, Any]:
    """The bytes of all files, by path."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def own_folders(folder: Path, own: list[int], count: int = 4) -> list[Path]:
    """A folder for each rank: the same, but for the ranks that have their own."""
    return [folder / (f"of-{rank}" if rank in own else "shared") for rank in range(count)]


# Saving.


def be_refused_and_go_on(rank: int, world_size: int, folders: list[Path]) -> Any:
    """A refused save; then the older checkpoint is loaded, and the next one is saved."""
    save(rank, world_size, folders[0], 1)
    before = contents(folders[0])
    if folders[rank] != folders[0]:  # what an older version left on this host's disk
        (folders[rank] / ".unfinished-7").mkdir(parents=True)
    error = raised(save, rank, world_size, folders[rank], 2, keep=1, wait_s=SOON_S)
    after = contents(folders[0]), contents(folders[rank])
    left = list(folders[rank].glob(".unfinished-*"))
    steps = [load(rank, world_size, folders[0])]
    save(rank, world_size, folders[0], 3)
    steps.append(load(rank, world_size, folders[0]))
    return error, before, after, left, steps


@pytest.mark.parametrize(
    ("own", "who"), [([1, 2, 3], "ranks 1, 2, 3"), ([2], "rank 2")], ids=["each", "one"]
)
def test_ranks_with_folders_of_their_own_save_nothing(
    quartet: World, tmp_path: Path, own: list[int], who: str
) -> None:
    folders = own_folders(tmp_path, own)
    results = quartet.run(be_refused_and_go_on, folders)
    for rank, (error, before, (shared, mine), left, steps) in enumerate(results):
        assert error.is_value_error, error.text
        assert error.seconds < WITHIN_S
        assert f"rank {rank}: save_checkpoint: expected a folder that all ranks share" in error.text
        assert f"where {who} on {HOST} cannot see what rank 0 on {HOST} wrote" in error.text
        assert shared == before  # the older one is whole and still the latest
        assert left == []
        assert mine == ({} if rank in own else before)
        assert steps == [1, 3]


def train_on(rank: int, world_size: int, folder: Path) -> tuple[Any, Any]:
    """Parameters after a refused save: of the training that goes on, and of one that resumes."""
    whole = Training(BOTH_WAYS)
    whole.run(rank, range(2))
    zcomm.save_checkpoint(folder, whole.parts(), 2)
    own = folder / f"of-{rank}"
    refused = raised(zcomm.save_checkpoint, own, whole.parts(), 2, wait_s=0)
    assert refused.is_value_error, refused.text
    whole.run(rank, range(2, 4))
    new = Training(BOTH_WAYS)
    assert zcomm.load_checkpoint(folder, new.parts()) == 2
    new.run(rank, range(2, 4))
    return whole.parameters(), new.parameters()


def test_training_goes_on_and_resumes_after_a_refused_save(pair: World, tmp_path: Path) -> None:
    for whole, resumed in pair.run(train_on, tmp_path):
        assert_bit_equal(resumed, whole)


class Losing(StateShard):
    """Breaks this rank's file while it is written: the rest goes to a file without a name."""

    damage: Callable[[Path], None]
    folder: Path

    def __get_tensor_shard__(self, index: object) -> Tensor:
        [file] = self.folder.glob(f".unfinished-*/__{self.start // 8}_0.distcp")
        Losing.damage(file)
        return self.part()


def shorten(file: Path) -> None:
    file.unlink()
    file.write_bytes(b"short")


DAMAGES: dict[str, Callable[[Path], None]] = {"lost": os.unlink, "short": shorten}


def lose_a_file(rank: int, world_size: int, folder: Path, damage: str) -> Any:
    save(rank, world_size, folder, 1)
    before = contents(folder)
    kind = Losing if rank == 1 else StateShard
    Losing.folder, Losing.damage = folder, DAMAGES[damage]
    state = part(rank, world_size, 2.0, kind)
    error = raised(zcomm.save_checkpoint, folder, state, 2, keep=1, wait_s=SOON_S)
    same = before == contents(folder) and not list(folder.glob(".unfinished-*"))
    steps = [load(rank, world_size, folder)]
    save(rank, world_size, folder, 3)
    return error, same, [*steps, load(rank, world_size, folder)]


@pytest.mark.parametrize(
    ("damage", "got"), [("lost", "got no file '"), ("short", "got 5 of ")], ids=list(DAMAGES)
)
def test_a_file_lost_before_the_end_leaves_the_checkpoint_before(
    pair: World, tmp_path: Path, damage: str, got: str
) -> None:
    for error, same, steps in pair.run(lose_a_file, tmp_path, damage):
        assert error.type == "RuntimeError", error.text
        assert "save_checkpoint: expected the files of all ranks in" in error.text
        assert got in error.text
        assert "__1_0.distcp'" in error.text
        assert error.seconds < WITHIN_S
        assert same
        assert steps == [1, 3]


def save_and_break(rank: int, world_size: int, folder: Path) -> list[list[int]]:
    """Five checkpoints, of which the third is broken; the steps that are kept after each."""
    left = []
    for step in (1, 2, 3, 4, 5):
        save(rank, world_size, folder, step)
        dist.barrier()  # rank 0 drops old ones last
        left.append(sorted(int(path.name[5:14]) for path in folder.glob("step-*")))
        if step == 3 and rank == 0:
            (folder / "step-000000003.0" / "__1_0.distcp").unlink()
    return left


def test_keep_counts_whole_checkpoints_only(pair: World, tmp_path: Path) -> None:
    for left in pair.run(save_and_break, tmp_path):
        # Of 2 and 3 the whole one stays beside 4. The broken one goes when it is the oldest.
        assert left == [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5]]


# Loading.


def load_what_differs(rank: int, world_size: int, folder: Path) -> dict[str, Raised]:
    """Rank 1 looks into a folder of its own; in the last case it alone has a checkpoint."""
    shared, copy = folder / "shared", folder / "copy"
    save(rank, world_size, shared, 5)
    save(rank, world_size, folder / "other", 5)
    if rank == 1:
        (folder / "nothing").mkdir()
        shutil.copytree(shared, folder / "part")
        (folder / "part" / "step-000000005.0" / "__0_0.distcp").unlink()
        shutil.copytree(shared, copy)
    options = {"wait_s": SOON_S}
    found = {}
    for name in ("nothing", "part", "other"):
        mine = folder / name if rank == 1 else shared
        found[name] = raised(load, rank, world_size, mine, **options)
    mine = shared if rank == 1 else folder / "absent"
    found["only rank 1"] = raised(load, rank, world_size, mine, **options)
    assert load(rank, world_size, copy if rank == 1 else shared) == 5  # a disk per host, all of it
    assert load(rank, world_size, folder / "absent") is None
    return found


def test_ranks_that_see_different_checkpoints_load_nothing(pair: World, tmp_path: Path) -> None:
    first, second = f"on rank 0 on {HOST}", f"on rank 1 on {HOST}"
    expected = {
        "nothing": f"{first}, got something else {second} (nothing is the latest in",
        "part": f"{first}, got something else {second} (no file",
        "other": f"{first}, got something else {second} (another checkpoint is called",
        "only rank 1": f"{second}, got something else {first} (nothing is the latest in",
    }
    for rank, found in enumerate(pair.run(load_what_differs, tmp_path)):
        for name, words in expected.items():
            assert found[name].is_value_error, (name, found[name].text)
            assert f"rank {rank}: load_checkpoint: expected all ranks to see" in found[name].text
            assert words in found[name].text, name
            assert found[name].seconds < WITHIN_S


# Files that show late.


def see_late(rank: int, world_size: int, folder: Path) -> list[int | None]:
    """Rank 1 reaches the folder by a link that somebody makes after a while."""
    (shared := folder / "shared").mkdir(exist_ok=True)
    links = [folder / "saving", folder / "loading"]
    steps = []
    for call, link in zip((save, load), links):
        late = threading.Timer(LATE_S, link.symlink_to, [shared])
        if rank == 1:
            late.start()
        mine = link if rank == 1 else shared
        steps.append(call(rank, world_size, mine, *([6] if call is save else [])))
    return steps


def test_ranks_wait_for_files_that_show_late(pair: World, tmp_path: Path) -> None:
    assert pair.run(see_late, tmp_path) == [[None, 6], [None, 6]]


# Ranks that do not save together.


def disagree(rank: int, world_size: int, folder: Path) -> list[Raised]:
    """Rank 0 saves and loads alone, then the ranks' steps differ, then all is well."""
    training = Training({"timeout_s": 1.5})
    state = training.parts()
    alone = []
    if rank == 0:
        alone = [raised(zcomm.save_checkpoint, folder, state, 1)]
        alone.append(raised(zcomm.load_checkpoint, folder, state))
    dist.barrier()
    step = -1 if rank == 1 else 1
    bad = raised(zcomm.save_checkpoint, folder, state, step)
    other = raised(zcomm.save_checkpoint, folder, state, rank)
    zcomm.save_checkpoint(folder, state, 4)
    assert zcomm.load_checkpoint(folder, state) == 4
    return [*alone, bad, other]


def test_ranks_that_do_not_save_together_are_told_in_time(pair: World, tmp_path: Path) -> None:
    (saved, loaded, told, other), (wrong, another) = pair.run(disagree, tmp_path)
    for error, call in ((saved, "save_checkpoint"), (loaded, "load_checkpoint")):
        assert error.type == "CommunicationError", error.text
        assert f"{call}: rank 1 (" in error.text
        assert "did not come within 1.5 s" in error.text
        assert error.seconds < WITHIN_S
    assert told.type == "CommunicationError"
    assert "save_checkpoint: rank 1" in told.text
    assert "ValueError: expected a step >= 0" in told.text
    assert wrong.is_value_error
    for rank, error in enumerate([other, another]):
        assert error.is_value_error
        assert f"rank {rank}: save_checkpoint: expected the same step on all ranks" in error.text
        assert "{0: 0, 1: 1}" in error.text


# Words.


def test_messages_name_ranks_by_host() -> None:
    blind = [Seen(1, "alpha", ""), Seen(2, "beta", ""), Seen(5, "beta", "")]
    assert named(blind) == "rank 1 on alpha and ranks 2, 5 on beta"


@pytest.mark.parametrize("wait_s", [-1, float("nan"), float("inf"), "10", True])
def test_the_time_to_wait_is_checked(wait_s: Any) -> None:
    with pytest.raises(ValueError, match="wait_s: expected seconds, 0 or more, got"):
        zcomm.save_checkpoint("folder", {}, 1, wait_s=wait_s)
    with pytest.raises(ValueError, match="wait_s: expected seconds, 0 or more, got"):
        zcomm.load_checkpoint("folder", {}, wait_s=wait_s)
