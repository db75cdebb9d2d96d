"""zcomm.integrations.lightning on two ranks: what a user of Lightning's Trainer can do, or try."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader, TensorDataset

import zcomm
from ddp_training import assert_bit_equal
from frameworks import FEEDBACK, be_a_torchrun_rank, examples, network, values
from raised import raised
from ranks import World
from zcomm.integrations.lightning import Compress

SILENT: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2) as world:
        world.run(be_a_torchrun_rank)
        yield world


def training_parts(base: type) -> type:
    """A module of Lightning, of either of its packages."""

    class Classifier(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.losses: list[float] = []

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: list[Tensor], _: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.2)

    return Classifier


Classifier = training_parts(LightningModule)


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*examples()), batch_size=32)


def trainer_of(*callbacks: Any, max_epochs: int = 2, **options: Any) -> Trainer:
    arguments = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", **SILENT, **options}
    return Trainer(max_epochs=max_epochs, callbacks=list(callbacks), **arguments)


def fit(rank: int, world_size: int, settings: Any, options: dict[str, Any]) -> Any:
    """Eight batches of this rank in an epoch, two epochs."""
    compress = None if settings is None else Compress(**settings)
    model = Classifier()
    trainer_of(*filter(None, [compress]), **options).fit(model, data(), data())
    return values(model), model.losses, compress and compress.handle.stats()


def assert_trained(results: list[Any], steps: int) -> None:
    (first, losses, stats), (second, *_) = results
    assert_bit_equal(first, second)
    assert losses[-1] < 0.95 * losses[0]
    assert stats.steps == steps
    assert stats.raw_bytes > 5 * stats.wire_bytes


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 16),
        ({"accumulate_grad_batches": 4}, 4),
        ({"gradient_clip_val": 0.5}, 16),
        ({"strategy": "ddp_find_unused_parameters_true"}, 16),
        ({"precision": "bf16-mixed"}, 16),
    ],
    ids=["plain", "accumulate", "clip", "unused", "bf16"],
)
def test_what_the_trainer_can_do_is_compressed(
    pair: World, options: dict[str, Any], steps: int
) -> None:
    uncompressed = pair.run(fit, {"codec": "none"}, options)
    plain = pair.run(fit, None, options)
    assert_bit_equal(uncompressed[0][0], plain[0][0])
    assert_trained(pair.run(fit, {"codec": "lm4"}, options), steps)


def fit_with_a_scaler(rank: int, world_size: int) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    compress, model = Compress(**FEEDBACK), Classifier()
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    trainer_of(compress, plugins=[precision]).fit(model, data())
    return values(model), model.losses, compress.handle.stats(), compress.handle.state_dict()


def test_the_scaler_of_mixed_precision_is_found(pair: World) -> None:
    results = pair.run(fit_with_a_scaler)
    assert_trained([result[:3] for result in results], 16)
    assert results[0][3]["scale"] == 256.0  # without the scaler it would be 1


def fit_twice(rank: int, world_size: int) -> Any:
    compress, model = Compress(codec="lm4"), Classifier()
    trainer = trainer_of(compress)
    trainer.fit(model, data())
    first = compress.handle
    trainer.validate(model, data(), verbose=False)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, data())
    return values(model), first.stats().steps, compress.handle.stats().steps


def test_a_second_fit_is_compressed_too(pair: World) -> None:
    (first, *steps), (second, *_) = pair.run(fit_twice)
    assert_bit_equal(first, second)
    assert steps == [16, 16]


# Checkpoints.


def fit_and_save(rank: int, world_size: int, path: str, settings: Any, epochs: int) -> Any:
    """Trains on from the checkpoint, if there is one, and leaves one."""
    compress, model = Compress(**settings), Classifier()
    trainer = trainer_of(compress, max_epochs=epochs)
    trainer.fit(model, data(), ckpt_path=path if Path(path).exists() else None)
    state = compress.handle.state_dict()
    trainer.save_checkpoint(path)
    return values(model), state


@pytest.mark.parametrize("codec", ["lm4", "topk:0.05"])
def test_a_resumed_training_has_every_ranks_residuals(
    pair: World, tmp_path: Path, codec: str
) -> None:
    settings = {"codec": codec, "feedback": True}
    whole = pair.run(fit_and_save, str(tmp_path / "whole.ckpt"), settings, 4)
    pair.run(fit_and_save, str(tmp_path / "part.ckpt"), settings, 2)
    parts = pair.run(fit_and_save, str(tmp_path / "part.ckpt"), settings, 4)
    for (expected, saved), (got, loaded) in zip(whole, parts):
        assert_bit_equal(got, expected)
        assert_bit_equal(loaded, saved)
    residuals = [state["residuals"]["sent"]["net.0.weight"] for _, state in whole]
    assert not torch.equal(*residuals)  # each rank has its own


def fit_with_checkpoints(rank: int, world_size: int, folder: str) -> Any:
    """Saves after each epoch; goes on from the second of three, in a trainer of its own."""
    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    whole, again = Classifier(), Classifier()
    options = {"max_epochs": 3, "enable_checkpointing": True}
    trainer_of(Compress(**FEEDBACK), saving, **options).fit(whole, data())
    path = f"{folder}/epoch=1.ckpt"
    trainer_of(Compress(**FEEDBACK), max_epochs=3).fit(again, data(), ckpt_path=path)
    return values(whole), values(again)


def test_checkpoints_of_each_epoch_have_residuals(pair: World, tmp_path: Path) -> None:
    for whole, again in pair.run(fit_with_checkpoints, str(tmp_path)):
        assert_bit_equal(again, whole)


def resume_wrongly(rank: int, world_size: int, path: str) -> Any:
    model = Classifier()
    other = raised(trainer_of(Compress("int8", feedback=True)).fit, model, data(), ckpt_path=path)
    without = Compress("int8", feedback=True, resume=False)
    trainer_of(without, max_epochs=3).fit(model, data(), ckpt_path=path)
    return other, without.handle.stats().steps


def test_residuals_of_another_codec_are_refused(pair: World, tmp_path: Path) -> None:
    path = str(tmp_path / "lm4.ckpt")
    pair.run(fit_and_save, path, FEEDBACK, 2)
    for error, steps in pair.run(resume_wrongly, path):
        assert error.is_value_error
        assert "Compress: expected a checkpoint whose residuals fit" in error.text
        assert "Compress(..., resume=False)" in error.text
        assert steps == 8


def test_without_residuals_another_codec_goes_on(pair: World, tmp_path: Path) -> None:
    path = str(tmp_path / "lm4.ckpt")
    pair.run(fit_and_save, path, {"codec": "lm4"}, 2)
    (_, state), _ = pair.run(fit_and_save, path, {"codec": "int8", "feedback": True}, 3)
    assert state["step"] == 24


# What is refused.


class Sharded(Classifier):  # type: ignore[misc, valid-type]
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return zcomm.ZeroOptimizer(self.trainer.strategy.model, torch.optim.AdamW)


def fit_wrongly(rank: int, world_size: int) -> dict[str, Any]:
    own_hook = DDPStrategy(ddp_comm_hook=fp16_compress_hook)
    alone = {"devices": 1, "strategy": "auto"}
    return {
        "hook": raised(trainer_of(Compress(), strategy=own_hook).fit, Classifier(), data()),
        "zero": raised(trainer_of().fit, Sharded(), data()),
        "alone": raised(trainer_of(Compress(), **alone).fit, Classifier(), data()),
    }


def test_strategies_that_cannot_be_compressed_are_refused() -> None:
    with World(2) as world:  # of its own: a strategy for one device in a group of two
        world.run(be_a_torchrun_rank)
        for found in world.run(fit_wrongly):
            assert "expected a strategy without ddp_comm_hook, got one" in found["hook"].text
            assert "step: expected no closure, got one" in found["zero"].text
            assert "got the strategy SingleDeviceStrategy" in found["alone"].text
            assert found["alone"].text.endswith('use Trainer(strategy="ddp", devices=...)')
            assert all(error.is_value_error for error in found.values())


def test_arguments_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="codec: expected one of"):
        Compress(codec="lm5")
    with pytest.raises(TypeError, match="unexpected keyword argument 'start'"):
        Compress(codec="lm4", start=5)
    with pytest.raises(RuntimeError, match=r"Compress.handle: expected a training that has start"):
        _ = Compress().handle
    with pytest.raises(ValueError, match=r"Compress.load_state_dict: expected the state of a"):
        Compress().load_state_dict({})


def fit_with_pytorch_lightning(rank: int, world_size: int) -> Any:
    compress, model = Compress(), training_parts(pytorch_lightning.LightningModule)()
    arguments = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", **SILENT}
    trainer = pytorch_lightning.Trainer(max_epochs=2, callbacks=[compress], **arguments)
    trainer.fit(model, data())
    return values(model), model.losses, compress.handle.stats()


def test_the_package_pytorch_lightning_takes_it_too(pair: World) -> None:
    assert_trained(pair.run(fit_with_pytorch_lightning), 16)
