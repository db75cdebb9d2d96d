"""The device engine produces the same bits as the CPU engine, in every kind of step.

Here it runs on CPU tensors and gloo, with streams that are only recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import WAYS, Mixed, Net, Spoiled, assert_bit_equal, batch, seeded
from ranks import World
from recorded_streams import device_engines
from zcomm.codecs import SPECS
from zcomm.engine.device import DeviceRunner, schedule
from zcomm.engine.pipeline import SLOTS
from zero_training import close, parameters, train, wrapped, zero

CODECS = [*SPECS[:-1], "topk:0.02", "int4:block=32"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[World]:
    with World(3) as world:
        yield world


def on_both(fn: Any, *args: Any) -> tuple[Any, Any]:
    """What fn returns with the CPU engine, and with the device engine."""
    plain = fn(*args)
    with device_engines():
        return plain, fn(*args)


# The collectives.


def collect(rank: int, world_size: int, codec: str) -> dict[str, Tensor]:
    group = dist.new_group(range(world_size))  # with a separate engine
    found = {}
    for n in (0, 1, 1000, 70_001, 1_700_000):
        for dtype in DTYPES if n < 10**6 else DTYPES[:1]:
            x = torch.randn(n * world_size, generator=torch.Generator().manual_seed(rank)).to(dtype)
            part, whole, feedback = x[:n].clone(), torch.empty_like(x), zcomm.Feedback()
            zcomm.reduce_scatter(part, x, codec, group, feedback)
            zcomm.all_gather(whole, part, codec, group, zcomm.Feedback())
            kept = zcomm.Feedback()
            for _ in range(2):
                zcomm.all_reduce(x, codec, group, kept)
            found |= {f"part {n} {dtype}": part, f"whole {n} {dtype}": whole, f"{n} {dtype}": x}
            found |= {f"{n} {dtype} sent": kept.state_dict()["sent"].get("", part)}
    return found


def collect_on_both(rank: int, world_size: int, codec: str) -> None:
    plain, device = on_both(collect, rank, world_size, codec)
    assert_bit_equal(device, plain)


@pytest.mark.parametrize("codec", CODECS)
def test_collectives_have_the_same_bits(three_ranks: World, codec: str) -> None:
    three_ranks.run(collect_on_both, codec)


def collect_at_once(rank: int, world_size: int) -> list[Tensor]:
    group = dist.new_group(range(world_size))
    tensors = [batch(rank, i, 300_000) for i in range(5)]
    works = [zcomm.all_reduce(t, "int8", group, async_op=True) for t in tensors]
    for work in works:
        work.wait()
        assert work.is_completed()
    return tensors


def collect_at_once_on_both(rank: int, world_size: int) -> None:
    plain, device = on_both(collect_at_once, rank, world_size)
    assert all(map(torch.equal, plain, device))


def test_asynchronous_collectives_run_in_order(three_ranks: World) -> None:
    three_ranks.run(collect_at_once_on_both)


# The hook.


def hooked(
    rank: int, ddp_options: dict[str, Any], model: Any = Net, scaled: bool = False, **settings: Any
) -> dict[str, Any]:
    """Parameters, gradients and the hook's state after five steps, one of them not finite."""
    ddp = DistributedDataParallel(seeded(model), **ddp_options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) if scaled else None
    handle = zcomm.compress(ddp, scaler=scaler, **settings)
    compressor = handle._compressor
    assert isinstance(compressor.engine.runner, DeviceRunner) == bool(compressor.streams)
    spoiled = Spoiled(next(ddp.parameters()), 5)
    opt = optim.SGD(ddp.parameters(), lr=0.1)
    states = []
    for step in range(5):
        opt.zero_grad()
        if scaled and step == 2 and rank == 1:
            spoiled.value = float("inf")
        loss = ddp(batch(rank, step)).float().square().mean()
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()
        if step > 1:
            states.append(handle.state_dict())
    named = dict(ddp.module.named_parameters())
    gradients = {name: p.grad for name, p in named.items()}
    found = {name: p.detach().clone() for name, p in named.items()}
    handle.close()
    return {"parameters": found, "gradients": gradients, **dict(zip("abc", states))}


def hooked_on_both(rank: int, world_size: int, *args: Any, **settings: Any) -> None:
    ddp_options, model, scaled, settings = args
    plain, device = on_both(lambda: hooked(rank, ddp_options, model, scaled, **settings))
    assert_bit_equal(device, plain)


@pytest.mark.parametrize("way", WAYS)
def test_hook_has_the_same_bits_however_ddp_makes_its_buckets(three_ranks: World, way: str) -> None:
    ddp_options, settings = WAYS[way]
    settings = {"codec": "lm4", "feedback": True, **settings}
    three_ranks.run(hooked_on_both, ddp_options, Net, False, settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"codec": "topk:0.05"},
        {"codec": "sign", "start_step": 2},
        {"codec": "lm4", "feedback": 0.7, "residual_dtype": "bf16"},
        {"codec": "lm2", "feedback": True, "residual_dtype": "int8"},
    ],
    ids=str,
)
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
def test_hook_has_the_same_bits_with_residuals_of_all_kinds(
    three_ranks: World, settings: dict[str, Any], scaled: bool
) -> None:
    three_ranks.run(hooked_on_both, {"bucket_cap_mb": 0.3}, Net, scaled, settings)


def test_hook_has_the_same_bits_with_several_dtypes(three_ranks: World) -> None:
    three_ranks.run(hooked_on_both, {}, Mixed, False, {"codec": "int8", "feedback": True})


# ZeRO.


def sharded(rank: int, model: Any, scaled: bool, options: dict[str, Any]) -> dict[str, Any]:
    ddp = wrapped(model, bucket_cap_mb=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) if scaled else None
    opt = zero(optim.AdamW, scaler=scaler, **options)(ddp)
    spoiled = Spoiled(next(ddp.parameters()), 5)
    if scaler is None:
        train(ddp, opt, rank, steps=4, accumulate=2, synchronised=True, max_norm=0.5)
    for step in range(4 if scaler else 0):
        opt.zero_grad()
        if step == 2 and rank == 1:
            spoiled.value = float("nan")
        scaler.scale(ddp(batch(rank, step)).float().square().mean()).backward()
        scaler.step(opt)
        scaler.update()
    gradient = opt.full_grad(next(p for p in ddp.parameters() if p.grad is not None))
    residuals = opt.handle.state_dict()["residuals"]
    consolidated = opt.consolidated_state_dict()
    close(opt)
    state = consolidated["state"][0] if consolidated else {}
    return {"p": parameters(ddp), "residuals": residuals, "grad": {"": gradient}, "state": state}


def sharded_on_both(rank: int, world_size: int, *args: Any) -> None:
    plain, device = on_both(lambda: sharded(rank, *args))
    assert_bit_equal(device, plain)


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
@pytest.mark.parametrize("model", [Net, Mixed], ids=["fp32", "mixed"])
@pytest.mark.parametrize(
    "options",
    [
        {"codec": "lm4", "feedback": True},
        {"codec": "int8", "feedback": True, "param_codec": "lm4", "chunk_mb": 1 / 16},
    ],
    ids=["exact", "param_codec"],
)
def test_zero_has_the_same_bits(
    three_ranks: World, model: type[nn.Module], scaled: bool, options: dict[str, Any]
) -> None:
    three_ranks.run(sharded_on_both, model, scaled, options)


# The schedule.


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("legs", [1, 2, 4])
def test_schedule_has_every_leg_once_and_never_more_chunks_than_slots(
    count: int, legs: int
) -> None:
    steps = list(schedule(count, legs))
    assert sorted(steps) == sorted((leg, i) for leg in range(legs + 1) for i in range(count))
    for i in range(count):
        at = [steps.index((leg, i)) for leg in range(legs + 1)]
        assert at == sorted(at)
        if i >= SLOTS:  # chunk i reuses the slot of chunk i - SLOTS
            assert steps.index((legs, i - SLOTS)) < at[0]
    for leg in range(legs + 1):
        assert [i for each, i in steps if each == leg] == list(range(count))
    if count > SLOTS:  # the network has work while a chunk is summed
        if legs > 1:
            assert steps.index((0, 1)) < steps.index((legs // 2, 0))
        assert steps.index((0, SLOTS - 1)) < steps.index((legs, 0))
