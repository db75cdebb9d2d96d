"""One dimension of a DeviceMesh: data parallel × tensor parallel, 2 × 2, on four ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import Net, assert_bit_equal, batch, seeded
from pages import PYTHON, ROOT, blocks
from raised import raised
from ranks import World
from zcomm.torch_private import checkpoint

needs_any_group = pytest.mark.skipif(
    not checkpoint.takes_any_group(), reason="this torch has no checkpoints of such groups"
)

pytest_plugins = ["zero_ranks"]

DP, TP = (0, 0, 1, 1), (0, 1, 0, 1)  # each rank's place in a 2 x 2 mesh
WAYS = ("device_mesh", "process_group")


def refused(fn: Any, *args: Any, **options: Any) -> str:
    """The message of the ValueError that a call raises."""
    error = raised(fn, *args, **options)
    assert error.is_value_error, f"{error.type}: {error.text}"
    return error.text


def mesh_2x2() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class Model:
    """A Net whose first two layers are split over `tp`, wrapped over `dp`."""

    def __init__(self, way: str = "device_mesh") -> None:
        self.mesh = mesh_2x2()
        split = {"first": ColwiseParallel(), "middle": RowwiseParallel()}
        self.net: nn.Module = parallelize_module(seeded(Net), self.mesh["tp"], split)
        if way == "device_mesh":
            self.ddp = DistributedDataParallel(self.net, device_mesh=self.mesh["dp"])
        else:  # what DDP does by itself for a mesh
            _pre_dp_module_transform(self.net)
            group = self.mesh["dp"].get_group()
            self.ddp = DistributedDataParallel(self.net, process_group=group)
        # Taken before the first forward pass: there torch removes split parameters from the model.
        self.parameters = dict(self.net.named_parameters())

    def train(self, optimizer: Any, steps: range) -> list[float]:
        """Trains on batches that all ranks of a `tp` group share; returns the losses."""
        losses = []
        for step in steps:
            optimizer.zero_grad()
            loss = self.ddp(batch(self.mesh.get_local_rank("dp"), step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}


def train_compressed(rank: int, world_size: int, way: str, codec: str | None) -> Any:
    model = Model(way)
    handle = zcomm.compress(model.ddp, codec) if codec else None
    sgd = torch.optim.SGD(model.parameters.values(), lr=0.5)
    losses = model.train(sgd, range(6))
    return model.values(), losses, handle.stats() if handle else None


@pytest.mark.parametrize("way", WAYS)
def test_without_a_codec_it_is_plain_ddp_bit_for_bit(quartet: World, way: str) -> None:
    plain, uncompressed = (quartet.run(train_compressed, way, codec) for codec in (None, "none"))
    for (expected, expected_losses, _), (got, losses, _) in zip(plain, uncompressed):
        assert_bit_equal(got, expected)
        assert losses == expected_losses


@pytest.mark.parametrize("way", WAYS)
def test_replicas_are_identical_and_bytes_compressed(quartet: World, way: str) -> None:
    results = quartet.run(train_compressed, way, "lm4")
    plain = quartet.run(train_compressed, way, None)
    for (parameters, losses, stats), (uncompressed, uncompressed_losses, _) in zip(results, plain):
        assert stats.steps == 6
        assert stats.raw_bytes > 6 * stats.wire_bytes
        assert losses[-1] < 0.5 * losses[0]
        assert losses[-1] == pytest.approx(uncompressed_losses[-1], rel=0.05)
        assert not torch.equal(parameters["first.weight"], uncompressed["first.weight"])
    for rank in (0, 1):  # the other replica of this part
        assert_bit_equal(results[rank + 2][0], results[rank][0])
    one, other = (results[rank][0]["first.weight"] for rank in (0, 1))
    assert one.shape == (140, 32)
    assert not torch.equal(one, other)  # they are different parts


# ZeRO.


def adamw(model: Model, codec: str | None) -> Any:
    if codec is None:
        return torch.optim.AdamW(model.parameters.values(), lr=1e-3)
    return zcomm.ZeroOptimizer(model.ddp, torch.optim.AdamW, lr=1e-3, codec=codec)


def train_sharded(rank: int, world_size: int, way: str, codec: str | None) -> Any:
    model = Model(way)
    optimizer = adamw(model, codec)
    losses = model.train(optimizer, range(6))
    inner = optimizer if codec is None else optimizer.inner
    held = sum(t.numel() for s in inner.state.values() for t in s.values() if t.dim())
    return model.values(), losses, held


@pytest.mark.parametrize("way", WAYS)
def test_zero_without_a_codec_is_adamw_bit_for_bit(quartet: World, way: str) -> None:
    plain, sharded = (quartet.run(train_sharded, way, codec) for codec in (None, "none"))
    for (expected, _, whole), (got, _, held) in zip(plain, sharded):
        assert_bit_equal(got, expected)
        assert abs(held - whole / 2) <= 2 * 128 * len(expected)  # a block per parameter


def test_zero_with_a_codec_has_identical_replicas(quartet: World) -> None:
    results = quartet.run(train_sharded, "device_mesh", "lm4")
    plain = quartet.run(train_sharded, "device_mesh", None)
    for rank in (0, 1):
        assert_bit_equal(results[rank + 2][0], results[rank][0])
    for (_, losses, _), (_, expected, _) in zip(results, plain):
        assert losses[-1] < losses[0]
        assert losses[-1] == pytest.approx(expected[-1], rel=0.1)


# Checkpoints.


def resume(rank: int, world_size: int, folder: str, steps: range) -> dict[str, Tensor]:
    """Resumes from the checkpoint, if any, and saves one: one folder per `tp` rank."""
    model = Model()
    optimizer = adamw(model, "none")
    own = f"{folder}/tp{model.mesh.get_local_rank('tp')}"
    state = {"model": model.parameters, "optimizer": optimizer}
    first = zcomm.load_checkpoint(own, state, group=model.mesh["dp"])
    assert first == (steps.start or None)
    model.train(optimizer, steps)
    zcomm.save_checkpoint(own, state, steps.stop, group=model.mesh["dp"].get_group())
    return model.values()


@needs_any_group
def test_a_checkpoint_for_each_part_goes_on_bit_for_bit(quartet: World, tmp_path: Path) -> None:
    whole = quartet.run(resume, str(tmp_path / "whole"), range(6))
    quartet.run(resume, str(tmp_path / "parts"), range(3))
    parts = quartet.run(resume, str(tmp_path / "parts"), range(3, 6))
    for expected, got in zip(whole, parts):
        assert_bit_equal(got, expected)


def save_with_an_old_torch(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """As if its checkpoints always asked rank 0. All groups ask: nothing is written."""
    group = mesh_2x2()["dp"].get_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "takes_any_group", lambda: False)
        tried = (zcomm.save_checkpoint, (folder, {}, 1)), (zcomm.load_checkpoint, (folder, {}))
        if dist.get_process_group_ranks(group)[0] == 0:
            return {}
        return {call.__name__: refused(call, *given, group=group) for call, given in tried}


def test_an_old_torch_saves_only_groups_with_rank_0(quartet: World, tmp_path: Path) -> None:
    for rank, found in enumerate(quartet.run(save_with_an_old_torch, str(tmp_path))):
        assert len(found) == 2 * (rank % 2)
        for what, text in found.items():
            start = f"rank {rank}: {what}: expected a group whose first rank is 0, got ranks [1, 3]"
            assert text == (
                f"{start}: torch {torch.__version__} has no checkpoints of others; install torch "
                "2.8 or later"
            )


def save_wrongly(rank: int, world_size: int, folder: str) -> dict[str, str]:
    model = Model()
    optimizer = adamw(model, "none")
    dp, state = model.mesh["dp"], {"model": model.net, "optimizer": optimizer}
    found = {"all ranks": refused(zcomm.save_checkpoint, folder, state, 1)}
    found["loaded"] = refused(zcomm.load_checkpoint, folder, state)
    model.train(optimizer, range(1))
    found["model"] = refused(zcomm.save_checkpoint, folder, state, 1, group=dp)
    state = {"parameters": model.parameters, "optimizer": optimizer}
    found["mesh"] = refused(zcomm.save_checkpoint, folder, state, 1, group=model.mesh)
    if model.mesh.get_local_rank("tp") == 0:
        zcomm.save_checkpoint(folder, state, 1, group=dp)
    dist.barrier()
    if model.mesh.get_local_rank("tp") == 0:
        zcomm.save_checkpoint(folder, state, 2, group=dp)  # its own folder
    else:
        found["folder"] = refused(zcomm.save_checkpoint, folder, state, 1, group=dp)
    return found


@needs_any_group
def test_checkpoints_that_would_not_be_whole_are_refused(quartet: World, tmp_path: Path) -> None:
    results = quartet.run(save_wrongly, str(tmp_path))
    for rank, found in enumerate(results):
        own = [TP[rank], TP[rank] + 2]
        for what in ("all ranks", "loaded"):
            assert (
                f"that of the optimizer's model, ranks {own}, got ranks [0, 1, 2, 3]"
                in (found[what])
            )
        assert "got one without 'first.weight': torch takes" in found["model"]
        assert "expected a group or a DeviceMesh of one dimension, got one of 2" in found["mesh"]
    for rank in (1, 3):
        expected = f"rank {rank}: save_checkpoint: expected a folder of its own for each group"
        assert results[rank]["folder"].startswith(expected)
        assert "to which ranks [0, 2] save" in results[rank]["folder"]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-000000001.0",
        "step-000000002.0",
    ]


# A hook that comes too late, and the collectives.


def hook_after_a_forward_pass(rank: int, world_size: int) -> list[str]:
    model = Model()
    model.ddp(batch(rank, 0)).sum().backward()
    by_hand = Model()
    by_hand.ddp.register_comm_hook(zcomm.HookState("lm4"), zcomm.hook)
    return [
        refused(zcomm.compress, model.ddp),
        refused(zcomm.ZeroOptimizer, model.ddp, torch.optim.AdamW),
        refused(by_hand.ddp(batch(rank, 0)).sum().backward),
    ]


def test_parameters_that_torch_took_out_of_the_model_are_noticed(quartet: World) -> None:
    for messages in quartet.run(hook_after_a_forward_pass):
        for message in messages:
            assert "got one without 4 of 6: over one dimension of a mesh" in message


def reduce_over_a_mesh(rank: int, world_size: int) -> Any:
    mesh = mesh_2x2()
    dp, group = mesh["dp"], mesh["dp"].get_group()
    mine = batch(rank, 0, 5000)
    by_group, by_mesh = mine.clone(), mine.clone()
    zcomm.all_reduce(by_group, "int8", group)
    zcomm.all_reduce(by_mesh, "int8", dp)
    whole, part = torch.empty(10000), torch.empty(2500)
    zcomm.all_gather(whole, mine, "none", dp)
    zcomm.reduce_scatter(part, mine, "none", dp)
    split = distribute_tensor(mine, mesh["tp"], [Shard(0)])
    messages = [
        refused(zcomm.all_reduce, mine, "int8", mesh),
        refused(zcomm.all_reduce, split, "int8", dp),
    ]
    zcomm.all_reduce(split.to_local(), "int8", dp)  # the engine has not seen the refused one
    return by_group, by_mesh, whole, part, messages


def test_collectives_take_one_dimension_of_a_mesh(quartet: World) -> None:
    given = [batch(rank, 0, 5000) for rank in range(4)]
    results = quartet.run(reduce_over_a_mesh)
    for rank, (by_group, by_mesh, whole, part, messages) in enumerate(results):
        column = [given[TP[rank]], given[TP[rank] + 2]]
        assert torch.equal(by_group, by_mesh)
        assert torch.equal(by_group, results[TP[rank]][0])
        peak = torch.cat(column).abs().max()  # int8 loses half a step in each of two encodings
        assert (by_group - (column[0] + column[1]) / 2).abs().max() < 1.01 * peak / 127
        assert torch.equal(whole, torch.cat(column))
        mean = column[0] * 0.5 + column[1] * 0.5
        assert torch.equal(part, mean[2500 * DP[rank] : 2500 * DP[rank] + 2500])
        assert "expected a group or a DeviceMesh of one dimension, got one of 2" in messages[0]
        assert "all_reduce: tensor: expected a tensor that holds data, got DTensor" in messages[1]
        assert messages[1].endswith("use .to_local()")


def run_the_page(rank: int, world_size: int, folder: str) -> None:
    names: dict[str, Any] = {}
    exec("\n".join(blocks(ROOT / "docs/frameworks.md", PYTHON)), names)
    names["train"](2, 2, folder)


@needs_any_group
def test_the_page_about_it_runs(quartet: World, tmp_path: Path) -> None:
    quartet.run(run_the_page, str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("tp*/step-*")) == ["step-000000001.0"] * 2
