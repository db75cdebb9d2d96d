"""Monitors report correct figures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import Branches, Mixed, batch, in_memory_order
from monitored_training import CODECS, WEIGHTS, Run
from ranks import World, run_ranks
from zcomm.monitor import Callback, Sample

pytest_plugins = ["ddp_ranks"]

# How much fp32 sums may differ when added in a different order.
ROUNDING = 1e-5


def local_gradients(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """This rank's own gradients from the last backward(), in memory order."""
    found: dict[str, Tensor] = {}
    for name, p in ddp.module.named_parameters():
        p.register_hook(lambda g, n=name, p=p: found.update({n: in_memory_order(g, p).clone()}))
    return found


def close_to(value: float | None, expected: float) -> bool:
    return value is not None and math.isclose(value, expected, rel_tol=ROUNDING)


# Figures of layers.


def figures_against_state(rank: int, world_size: int, codec: str, feedback: Any) -> dict[str, Any]:
    """Each weight's figures, and the same figures from gradients and saved residuals."""
    run = Run(codec=codec, feedback=feedback)
    gradients = local_gradients(run.ddp)
    samples: list[Sample] = []
    Callback(run.handle, samples.append, every=1, layers_every=3)
    run.steps(rank, 2)
    before = run.handle.state_dict()["residuals"]["sent"]
    run.step(rank, 2)
    after = run.handle.state_dict()["residuals"]["sent"]
    found = {}
    for name in WEIGHTS:
        old, new = before[name].double(), after[name].double()
        decay = 0.0 if feedback is True else feedback
        x, left = gradients[name] / world_size + old, (new - decay * old) / (1 - decay)
        layer = samples[-1].layers[name]
        found[name] = (
            (layer.grad_norm, gradients[name].norm().item()),
            (layer.residual_norm, new.norm().item()),
            (layer.compression_error, (left.norm() / x.norm()).item()),
        )
    run.handle.close()
    return found


@pytest.mark.parametrize("feedback", [True, 0.5])
@pytest.mark.parametrize("codec", CODECS[1:])
def test_figures_are_those_of_gradients_and_residuals(
    pair: World, codec: str, feedback: Any
) -> None:
    for found in pair.run(figures_against_state, codec, feedback):
        for name, figures in found.items():
            for got, expected in figures:
                assert expected > 0, name
                assert close_to(got, expected), (name, got, expected)


def figures_without_feedback(rank: int, world_size: int) -> dict[str, list[bool]]:
    found: dict[str, list[bool]] = {}
    for spec in ("bf16", "int8", "int4"):  # their blocks do not depend on pieces
        run, codec = Run(codec=spec, feedback=False), zcomm.codec(spec)
        gradients = local_gradients(run.ddp)
        samples: list[Sample] = []
        Callback(run.handle, samples.append, layers_every=2)
        run.steps(rank, 2)
        (sample,) = samples
        for name in WEIGHTS:
            x = gradients[name].float() / world_size
            error = (x - codec.decode(codec.encode(x), x.numel())).norm() / x.norm()
            layer = sample.layers[name]
            same = layer.residual_norm is None and 0 < error.item() < 0.3
            found.setdefault(spec, []).append(
                same and math.isclose(layer.compression_error, error.item(), rel_tol=1e-4)
            )
        found[spec].append(sample.layers["first.bias"].compression_error == 0)
        whole = math.hypot(*(layer.grad_norm for layer in sample.layers.values()))
        found[spec].append(close_to(sample.grad_norm, whole))
        run.handle.close()
    return found


def test_error_without_feedback_is_that_of_one_encoding(pair: World) -> None:
    for found in pair.run(figures_without_feedback):
        assert found == dict.fromkeys(("bf16", "int8", "int4"), [True] * 5)


def mixed_dtypes(rank: int, world_size: int, zero: bool) -> dict[str, Any]:
    run = Run(Mixed, zero, "int8", feedback=True, start_step=2, residual_dtype="int8")
    gradients = local_gradients(run.ddp)
    samples: list[Sample] = []
    Callback(run.owner, samples.append, layers_every=1)
    run.steps(rank, 3)
    run.handle.close()
    warm, *_, last = samples
    return {
        "norms": [
            close_to(last.layers[n].grad_norm, g.norm().item()) for n, g in gradients.items()
        ],
        "warm": {layer.compression_error for layer in warm.layers.values()},
        "errors": {n: layer.compression_error for n, layer in last.layers.items()},
        "residuals": {n for n, layer in last.layers.items() if layer.residual_norm},
    }


@pytest.mark.parametrize("zero", [False, True], ids=["compress", "ZeRO"])
def test_what_goes_uncompressed_has_no_error(pair: World, zero: bool) -> None:
    for found in pair.run(mixed_dtypes, zero):
        assert found["norms"] == [True] * 6
        assert found["warm"] == {0.0}
        lossy = {name for name, error in found["errors"].items() if error}
        assert lossy == found["residuals"] == {"single.weight", "brief.weight"}
        assert all(error < 0.02 for error in found["errors"].values())


def unused_layer(rank: int, world_size: int) -> list[Any]:
    run = Run(Branches, ddp={"find_unused_parameters": True}, feedback=True)
    samples: list[Sample] = []
    Callback(run.handle, samples.append, layers_every=1)
    run.step(rank, 0)
    run.ddp.module.branch = "middle"
    run.step(rank, 1)
    run.handle.close()
    return [s.layers["other.weight"] for s in samples]


def test_unused_layer_keeps_its_residual_and_sends_nothing(pair: World) -> None:
    for used, unused in pair.run(unused_layer):
        assert used.residual_norm == unused.residual_norm > 0
        assert unused.grad_norm == 0
        assert unused.compression_error == 1


def scaled_figures(rank: int, world_size: int) -> list[Sample]:
    found: list[Sample] = []
    for scale in (None, 1024.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else None
        run = Run(feedback=True, scaler=scaler)
        Callback(run.handle, found.append, every=2, layers_every=2)
        for number in range(2):
            loss = run.ddp(batch(rank, number)).square().mean()
            (scaler.scale(loss) if scaler else loss).backward()
            run.optimizer.zero_grad()
        run.handle.close()
    return found


def test_norms_are_without_the_loss_scale(pair: World) -> None:
    for plain, scaled in pair.run(scaled_figures):
        for name, layer in plain.layers.items():
            other = scaled.layers[name]
            assert close_to(other.grad_norm, layer.grad_norm)
            assert close_to(other.compression_error, layer.compression_error)
            if layer.residual_norm is not None:
                assert close_to(other.residual_norm, layer.residual_norm)


def spoiled_figures(rank: int, world_size: int) -> Any:
    run = Run(codec={"first.weight": "none", "*": "int8"})
    run.ddp.module.first.weight.register_hook(lambda g: torch.full_like(g, math.inf))
    run.ddp.module.middle.weight.register_hook(lambda g: torch.full_like(g, math.nan))
    samples: list[Sample] = []
    Callback(run.handle, samples.append, layers_every=1)
    run.step(rank, 0)
    run.handle.close()
    return {name: samples[0].layers[name] for name in WEIGHTS}


def test_gradients_that_are_not_finite_are_reported_as_such(pair: World) -> None:
    for found in pair.run(spoiled_figures):
        exact, lossy, intact = (found[name] for name in WEIGHTS)
        assert (exact.grad_norm, exact.compression_error) == (math.inf, 0)
        assert math.isnan(lossy.grad_norm)
        assert math.isnan(lossy.compression_error)
        assert 0 < intact.compression_error < 0.02


# Figures of steps.


def totals(rank: int, world_size: int, zero: bool) -> Any:
    """The sampled steps, each sample's totals, the handle's totals, and the ratio of bytes."""
    run = Run(zero=zero, **({"param_codec": "lm4"} if zero else {}))
    run.steps(rank, 1)
    seen: list[tuple[Sample, Any]] = []
    before = run.handle.stats()
    Callback(run.owner, lambda s: seen.append((s, run.handle.stats())), every=3, layers_every=4)
    run.steps(rank, 9)
    compared = []
    for sample, after in seen:
        for name in (
            "raw_bytes",
            "wire_bytes",
            "shared_bytes",
            "encode_s",
            "wait_s",
            "decode_s",
            "exposed_s",
        ):
            expected = getattr(after, name) - getattr(before, name)
            compared.append((getattr(sample, name) * sample.steps, expected))
        before = after
    run.handle.close()
    return [(s.step, s.steps, bool(s.layers)) for s, _ in seen], compared, seen[0][0].ratio


@pytest.mark.parametrize("zero", [False, True], ids=["compress", "ZeRO"])
def test_samples_add_up_to_the_totals(pair: World, zero: bool) -> None:
    for sampled, compared, ratio in pair.run(totals, zero):
        assert sampled == [(3, 2, False), (4, 1, True), (6, 2, False), (8, 2, True), (9, 1, False)]
        assert 6 < ratio < 8
        for got, expected in compared:
            assert expected > 0
            assert math.isclose(got, expected)


def memory(rank: int, world_size: int, by_handle: bool) -> Any:
    run = Run(Mixed, True, "lm4", param_codec="lm4", feedback=True)
    samples: list[Sample] = []
    Callback(run.handle if by_handle else run.owner, samples.append, every=2)
    run.steps(rank, 1)
    run.backward(rank, 1)
    state = run.optimizer.inner.state.values()
    expected = {
        "parameters": sum(p.nbytes for p in run.ddp.parameters()),
        "residuals": run.handle.residual_nbytes(),
        "buffers": run.handle.buffer_nbytes(),
        "optimizer": sum(v.nbytes for s in state for v in s.values()),
        "masters": sum(s.tensor.nbytes for s in run.optimizer.shards.values() if s.has_master),
    }
    run.handle.close()
    return samples[0].memory, expected


@pytest.mark.parametrize("by_handle", [False, True], ids=["ZeroOptimizer", "its handle"])
def test_memory_is_that_of_the_rank(pair: World, by_handle: bool) -> None:
    for found, expected in pair.run(memory, by_handle):
        assert {name: getattr(found, name) for name in expected} == expected
        assert all(expected.values())
        assert found.core > 0


def alone(rank: int, world_size: int) -> Sample:
    run, samples = Run(feedback=True), []
    Callback(run.handle, samples.append, layers_every=1)
    run.step(rank, 0)
    return samples[0]


def test_one_rank_sends_nothing_and_loses_nothing() -> None:
    (sample,) = run_ranks(1, alone)
    assert sample.wire_bytes == sample.compression_error == 0
    assert sample.ratio == 1.0
    assert "ratio" not in sample.scalars()
    assert all(layer.grad_norm > 0 for layer in sample.layers.values())
    assert sample.memory.optimizer is None


def joined(rank: int, world_size: int) -> list[int]:
    run, samples = Run(feedback=True), []
    Callback(run.handle, samples.append, every=1, layers_every=2)
    with Join([run.ddp]):
        run.steps(rank, 2 + 4 * rank)
    run.handle.close()
    return [s.step for s in samples]


def test_rank_that_has_run_out_of_data_is_monitored(pair: World) -> None:
    assert pair.run(joined) == [[1, 2, 3, 4, 5, 6]] * 2
