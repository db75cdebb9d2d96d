"""zcomm.compress and ZeroOptimizer on what Accelerate prepares, on two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zcomm
from ddp_training import assert_bit_equal
from frameworks import be_a_torchrun_rank, examples, network, values
from ranks import World


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2) as world:
        world.run(be_a_torchrun_rank)
        yield world


def adamw(model: Any, codec: str | None) -> Any:
    if codec is None:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return zcomm.ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2, codec=codec)


def train(
    accelerator: Accelerator, model: Any, optimizer: Any, clip: Any = None, epochs: int = 2
) -> list[float]:
    """Eight batches of this rank in an epoch."""
    data = accelerator.prepare(DataLoader(TensorDataset(*examples()), batch_size=32))
    losses = []
    for x, y in (batch for _ in range(epochs) for batch in data):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip:
                clip()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_compressed(
    rank: int, world_size: int, codec: str | None, scaled: bool, accumulate: int
) -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    if scaled:  # mixed_precision="fp16" needs a GPU; its scaler does not
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    model = network()
    model, optimizer = accelerator.prepare(model, adamw(model, None))
    settings = {"feedback": True} if scaled else {}
    handle = codec and zcomm.compress(model, codec, scaler=accelerator.scaler, **settings)
    losses = train(
        accelerator,
        model,
        optimizer,
        lambda: accelerator.clip_grad_norm_(model.parameters(), 0.5),
    )
    return values(model), losses, handle and handle.stats(), handle and handle.state_dict()


@pytest.mark.parametrize("scaled", [False, True], ids=["fp32", "scaler"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_prepared_model_is_compressed(pair: World, accumulate: int, scaled: bool) -> None:
    plain, uncompressed, compressed = (
        pair.run(train_compressed, codec, scaled, accumulate) for codec in (None, "none", "lm4")
    )
    assert_bit_equal(uncompressed[0][0], plain[0][0])
    (first, losses, stats, state), (second, *_) = compressed
    assert_bit_equal(first, second)
    assert losses[-1] < 0.95 * losses[0]
    assert stats.steps == 16 / accumulate
    assert stats.raw_bytes > 5 * stats.wire_bytes
    assert state["scale"] == (256.0 if scaled else 1.0)


def train_sharded(rank: int, world_size: int, codec: str | None, folder: str) -> Any:
    """The model prepared, the optimizer not: it is made of what is prepared."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(network())
    optimizer = adamw(model, codec)
    if codec is None:
        optimizer = accelerator.prepare(optimizer)
        losses = train(accelerator, model, optimizer)
        return values(model.module), losses, None

    class OnceAnUpdate:  # what a prepared optimizer does by itself
        def step(self) -> None:
            if accelerator.sync_gradients:
                optimizer.step()

        def zero_grad(self) -> None:
            if accelerator.sync_gradients:
                optimizer.zero_grad()

    losses = train(accelerator, model, OnceAnUpdate())
    zcomm.save_checkpoint(folder, {"model": model.module, "optimizer": optimizer}, step=8)
    return values(model.module), losses, optimizer.handle.stats()


def test_zero_on_a_prepared_model_is_adamw(pair: World, tmp_path: Path) -> None:
    plain = pair.run(train_sharded, None, str(tmp_path))
    sharded = pair.run(train_sharded, "none", str(tmp_path))
    compressed = pair.run(train_sharded, "lm4", str(tmp_path))
    assert_bit_equal(sharded[0][0], plain[0][0])
    assert_bit_equal(compressed[0][0], compressed[1][0])
    assert compressed[0][1][-1] < 0.95 * compressed[0][1][0]
    assert compressed[0][2].steps == 8
