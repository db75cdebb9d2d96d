"""zcomm.integrations.transformers on two ranks: what a user of the Trainer can do, or try."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import zcomm
from ddp_training import assert_bit_equal
from frameworks import FEEDBACK, be_a_torchrun_rank, values
from raised import raised
from ranks import World
from zcomm.integrations.transformers import Compress


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2) as world:
        world.run(be_a_torchrun_rank)
        yield world


def gpt() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=64,
        n_layer=1,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def counting(count: int = 64) -> list[dict[str, Tensor]]:
    starts = torch.randint(64, (count, 1), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(16)) % 64]


def trainer_of(folder: str, *callbacks: Any, **options: Any) -> Trainer:
    """Two batches of this rank in an epoch."""
    arguments: dict[str, Any] = {
        "use_cpu": True,
        "ddp_backend": "gloo",
        "per_device_train_batch_size": 16,
        "num_train_epochs": 4,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    args = TrainingArguments(output_dir=folder, **{**arguments, **options})
    parts = {"train_dataset": counting(), "eval_dataset": counting(16)}
    return Trainer(gpt(), args, callbacks=list(callbacks), **parts)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(rank: int, world_size: int, folder: str, settings: Any, options: Any) -> Any:
    compress = None if settings is None else Compress(**settings)
    trainer = trainer_of(folder, *filter(None, [compress]), **options)
    trainer.train()
    return values(trainer.model), losses(trainer), compress and compress.handle.stats()


def assert_trained(results: list[Any], steps: int) -> None:
    (first, fell, stats), (second, *_) = results
    assert_bit_equal(first, second)
    assert fell[-1] < 0.95 * fell[0]
    assert stats.steps == steps
    assert stats.raw_bytes > 5 * stats.wire_bytes


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 8),
        ({"gradient_accumulation_steps": 2}, 4),
        ({"max_grad_norm": 0.1}, 8),
        ({"eval_strategy": "epoch", "bf16": True}, 8),
        ({"gradient_checkpointing": True}, 8),
    ],
    ids=["plain", "accumulate", "clip", "eval and bf16", "recompute"],
)
def test_what_the_trainer_can_do_is_compressed(
    pair: World, tmp_path: Path, options: dict[str, Any], steps: int
) -> None:
    folder = str(tmp_path)
    uncompressed = pair.run(train, folder, {"codec": "none"}, options)
    plain = pair.run(train, folder, None, options)
    assert_bit_equal(uncompressed[0][0], plain[0][0])
    assert_trained(pair.run(train, folder, {"codec": "lm4"}, options), steps)


def train_with_a_scaler(rank: int, world_size: int, folder: str) -> Any:
    """fp16 of the Trainer needs a GPU; its scaler does not."""
    compress = Compress(**FEEDBACK)
    trainer = trainer_of(folder, compress)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    trainer.train()
    handle = compress.handle
    return values(trainer.model), losses(trainer), handle.stats(), handle.state_dict()["scale"]


def test_the_scaler_of_the_accelerator_is_found(pair: World, tmp_path: Path) -> None:
    results = pair.run(train_with_a_scaler, str(tmp_path))
    assert_trained([result[:3] for result in results], 8)
    assert results[0][3] == 256.0


def train_twice(rank: int, world_size: int, folder: str) -> Any:
    compress = Compress(codec="lm4")
    trainer = trainer_of(folder)
    trainer.add_callback(compress)
    trainer.train()
    trainer.evaluate()
    trainer.train()
    return values(trainer.model), losses(trainer), compress.handle.stats()


def test_a_second_train_is_compressed_too(pair: World, tmp_path: Path) -> None:
    assert_trained(pair.run(train_twice, str(tmp_path)), 16)


# Checkpoints.


def train_in_parts(rank: int, world_size: int, folder: str, settings: Any, parts: Any) -> Any:
    """A trainer for each part; all but the first resume, from where the path or True says."""
    for epochs, resume in parts:
        compress = Compress(**settings)
        trainer = trainer_of(folder, compress, num_train_epochs=epochs, save_strategy="epoch")
        trainer.train(resume_from_checkpoint=resume)
    return values(trainer.model), compress.handle.state_dict()


@pytest.mark.parametrize("codec", ["lm4", "topk:0.05"])
def test_a_resumed_training_has_every_ranks_residuals(
    pair: World, tmp_path: Path, codec: str
) -> None:
    settings = {"codec": codec, "feedback": True}
    whole = pair.run(train_in_parts, str(tmp_path / "whole"), settings, [(4, None)])
    folder = tmp_path / "parts"
    parts = pair.run(train_in_parts, str(folder), settings, [(2, None), (4, True)])
    path = str(tmp_path / "whole" / "checkpoint-6")
    elsewhere = pair.run(train_in_parts, str(tmp_path / "else"), settings, [(4, path)])
    for (expected, saved), *others in zip(whole, parts, elsewhere):
        for got, loaded in others:
            assert_bit_equal(got, expected)
            assert_bit_equal(loaded, saved)
    residuals = [state["residuals"]["sent"]["transformer.wte.weight"] for _, state in whole]
    assert not torch.equal(*residuals)
    files = [path.name for path in (folder / "checkpoint-4").glob("zcomm*")]
    assert sorted(files) == ["zcomm_rank0.pt", "zcomm_rank1.pt"]


def resume_wrongly(rank: int, world_size: int, folder: str) -> Any:
    path, int8 = f"{folder}/checkpoint-4", {"codec": "int8", "feedback": True}

    def resume(**settings: Any) -> Compress:
        compress = Compress(**settings)
        trainer_of(folder, compress, num_train_epochs=3).train(resume_from_checkpoint=path)
        return compress

    found = {"codec": raised(resume, **int8)}
    steps = resume(**int8, resume=False).handle.stats().steps
    dist.barrier()
    if rank == 0:
        for number in (0, 1):
            Path(path, f"zcomm_rank{number}.pt").unlink()
    dist.barrier()
    without = resume(**FEEDBACK).handle.state_dict()["step"]
    return found["codec"], steps, without


def test_residuals_that_do_not_fit_are_refused(pair: World, tmp_path: Path) -> None:
    pair.run(train_in_parts, str(tmp_path), FEEDBACK, [(2, None)])
    for error, steps, without in pair.run(resume_wrongly, str(tmp_path)):
        assert error.is_value_error
        assert "Compress: expected a checkpoint whose residuals fit" in error.text
        assert "Compress(..., resume=False)" in error.text
        assert steps == 2
        assert without == 2  # of a checkpoint that was made without zcomm


def resume_from_own_disk(rank: int, world_size: int, disk: str) -> Any:
    trainer = trainer_of(f"{disk}{rank}", Compress(**FEEDBACK), num_train_epochs=3)
    return raised(trainer.train, resume_from_checkpoint=f"{disk}{rank}/checkpoint-4")


def test_ranks_that_do_not_find_the_same_are_refused(pair: World, tmp_path: Path) -> None:
    pair.run(train_in_parts, str(tmp_path / "run"), FEEDBACK, [(2, None)])
    for rank in (0, 1):
        shutil.copytree(tmp_path / "run", tmp_path / f"disk{rank}")
    for lost in (tmp_path / "disk1/checkpoint-4").glob("zcomm_rank*"):
        lost.unlink()
    for rank, error in enumerate(pair.run(resume_from_own_disk, str(tmp_path / "disk"))):
        assert error.is_value_error
        assert error.text.startswith(
            f"rank {rank}: expected the same file of zcomm in checkpoint-4"
        )
        assert "rank 0: there, rank 1: not there" in error.text


# What is refused.


def train_alone(rank: int, world_size: int, folder: str) -> Any:
    trainer = trainer_of(folder, Compress())
    trainer.accelerator.prepare_model = lambda model, **_: model
    error = raised(trainer.train)
    own = trainer_of(folder, Compress(), ddp_find_unused_parameters=False)
    first = own.accelerator.prepare_model

    def with_a_hook(model: Any, **options: Any) -> Any:
        ddp = first(model, **options)
        zcomm.compress(ddp, "int8")
        return ddp

    own.accelerator.prepare_model = with_a_hook
    return error, raised(own.train)


def test_models_that_cannot_be_compressed_are_refused(tmp_path: Path) -> None:
    with World(2) as world:
        world.run(be_a_torchrun_rank)
        for alone, hooked in world.run(train_alone, str(tmp_path)):
            assert alone.is_value_error
            assert "DistributedDataParallel, got GPT2LMHeadModel (ParallelMode.DISTR" in alone.text
            assert alone.text.endswith("start the script with torchrun, without FSDP and DeepSpeed")
            assert hooked.is_value_error
            assert "expected a model without a comm hook, got one with hook" in hooked.text


def test_one_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got GPT2LMHeadModel .*start the script with torchrun"):
        trainer_of(str(tmp_path), Compress(), ddp_backend=None).train()


def test_arguments_are_checked_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="codec: expected one of"):
        Compress(codec="lm5")
    with pytest.raises(RuntimeError, match=r"Compress.handle: expected a training that has start"):
        _ = Compress().handle
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(RuntimeError, match=r"expected to be called by transformers.Trainer.train"):
        Compress().on_train_begin(args, TrainerState(), TrainerControl())
