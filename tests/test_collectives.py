"""all_reduce, reduce_scatter and all_gather on real ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from everyones import everyones
from raised import Raised, raised
from ranks import World, run_ranks

CODECS = ("none", "bf16", "int8", "lm4", "lm2", "sign", "topk:0.05")
# Squared error of one encoding of a Gaussian, relative to its square, with room.
ERROR = {"none": 1e-12, "bf16": 1e-5, "int8": 2e-4, "lm4": 0.012, "lm2": 0.15}
SIZES = (0, 1, 127, 1000, 70_001, 1_500_000)


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[World]:
    with World(3) as world:
        yield world


def data(rank: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank)).to(dtype)


def exact_mean(world_size: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([data(r, n, dtype).double() for r in range(world_size)]).mean(0)


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got - exact).square().sum() / exact.square().sum().clamp(min=1e-30))


def same_on_all_ranks(t: torch.Tensor, group: Any = None) -> bool:
    everyone = [torch.empty_like(t) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, t, group=group)
    return all(torch.equal(t.view(torch.uint8), x.view(torch.uint8)) for x in everyone)


def feedback_for(codec: str) -> zcomm.Feedback | None:
    return zcomm.Feedback() if codec.startswith(("sign", "topk")) else None


def reduce_everything(rank: int, world_size: int) -> None:
    for n in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for codec in CODECS:
                x = data(rank, n, dtype)
                assert zcomm.all_reduce(x, codec, feedback=feedback_for(codec)) is None
                assert same_on_all_ranks(x), (n, dtype, codec)
                check_error(codec, dtype, x, exact_mean(world_size, n, dtype), hops=2)


def check_error(
    codec: str, dtype: torch.dtype, got: torch.Tensor, exact: torch.Tensor, hops: int
) -> None:
    if dtype is torch.float64:
        codec = "none"  # goes as it is
    if codec not in ERROR or exact.numel() < 1000:
        return
    rounding = {torch.bfloat16: 1e-5, torch.float16: 2e-7}.get(dtype, 0.0)
    # Each rank's own error is averaged, the second encoding's is not; both are below this.
    bound = hops * ERROR[codec] + rounding
    assert relative_error(got.double(), exact) < bound, (codec, dtype, exact.numel())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_reduce_of_any_size_dtype_and_codec(world_size: int, three_ranks: World) -> None:
    if world_size == 3:
        three_ranks.run(reduce_everything)
    else:
        run_ranks(world_size, reduce_everything)


def scatter_and_gather(rank: int, world_size: int) -> None:
    for n in (0, 1, 130, 70_001):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for codec in CODECS:
                x = data(rank, n * world_size, dtype)
                part = torch.empty(n, dtype=dtype)
                zcomm.reduce_scatter(part, x, codec, feedback=feedback_for(codec))
                mean = exact_mean(world_size, n * world_size, dtype)
                check_error(codec, dtype, part, mean[rank * n : (rank + 1) * n], hops=1)
                assert torch.equal(x, data(rank, n * world_size, dtype))  # the input is left alone
                whole = torch.empty(n * world_size, dtype=dtype)
                zcomm.all_gather(whole, part, codec, feedback=feedback_for(codec))
                assert same_on_all_ranks(whole)
                own = whole[rank * n : (rank + 1) * n].double()
                check_error(codec, dtype, own, part.double(), hops=1)


def test_reduce_scatter_and_all_gather(three_ranks: World) -> None:
    three_ranks.run(scatter_and_gather)


def sums_in_rank_order(rank: int, world_size: int) -> None:
    n = 300_000
    parts = [data(r, n) for r in range(world_size)]
    mean, total = parts[0] * (1 / world_size), parts[0].clone()
    for part in parts[1:]:
        mean, total = mean + part * (1 / world_size), total + part
    x = data(rank, n)
    zcomm.all_reduce(x, "none")
    assert torch.equal(x, mean)
    x = data(rank, n)
    zcomm.all_reduce(x, codec="none", op="sum")
    assert torch.equal(x, total)
    own = torch.empty(n // world_size)
    zcomm.reduce_scatter(own, data(rank, n), "none", op="sum")
    assert torch.equal(own, total[rank * own.numel() : (rank + 1) * own.numel()])


def test_none_is_the_sum_in_rank_order_bit_for_bit(three_ranks: World) -> None:
    three_ranks.run(sums_in_rank_order)


def accumulate(rank: int, world_size: int, codec: str, steps: int) -> tuple[float, float]:
    """The errors of the sum over steps of the same gradient, with and without feedback."""
    n = 40_000
    exact = exact_mean(world_size, n) * steps
    errors = []
    for feedback in (zcomm.Feedback(), None):
        total = torch.zeros(n, dtype=torch.float64)
        for _ in range(steps):
            x = data(rank, n)
            zcomm.all_reduce(x, codec, feedback=feedback)
            total += x
        errors.append(relative_error(total, exact))
    return errors[0], errors[1]


@pytest.mark.parametrize("codec", ["int4", "lm2"])
def test_feedback_makes_up_for_what_was_left_out(three_ranks: World, codec: str) -> None:
    # Of a sum over T steps only the last residuals are missing: T^2 = 400 times less, if a residual
    # were as large as one step's error. With feedback it is several times larger.
    for with_feedback, without in three_ranks.run(accumulate, codec, 20):
        assert with_feedback < without / 20


def conserve(rank: int, world_size: int, codec: str) -> float:
    """How far the sum of results and residuals is from the sum of gradients."""
    n, steps = 30_000, 6
    feedback = zcomm.Feedback()
    total = torch.zeros(n, dtype=torch.float64)
    for _ in range(steps):
        x = data(rank, n)
        zcomm.all_reduce(x, codec, feedback=feedback)
        total += x
    state = feedback.state_dict()
    left = state["sent"][""].double()
    dist.all_reduce(left)
    owned = state["owned"][""].double()
    exact = exact_mean(world_size, n) * steps
    return float((total + left + torch.cat(everyones(owned)) - exact).abs().max())


@pytest.mark.parametrize("codec", ["int8", "lm4", "sign", "topk:0.01"])
def test_nothing_is_lost(three_ranks: World, codec: str) -> None:
    # Results + all ranks' residuals + the owners' residuals = the gradients, to fp32's rounding.
    assert max(three_ranks.run(conserve, codec)) < 2e-5


def reduce_in_pairs(rank: int, world_size: int) -> None:
    pair = dist.new_group([0, 2])
    alone = dist.new_group([1])
    x = data(rank, 10_000)
    if rank == 1:
        zcomm.all_reduce(x, "lm4", group=alone)
        assert torch.equal(x, data(rank, 10_000))
        message = raised(zcomm.all_reduce, x, group=pair).text
        assert "expected a group that this rank belongs to" in message
        return
    zcomm.all_reduce(x, "int8", group=pair)
    assert same_on_all_ranks(x, pair)
    mean = torch.stack([data(0, 10_000), data(2, 10_000)]).double().mean(0)
    assert relative_error(x.double(), mean) < 2e-4


def test_subgroups(three_ranks: World) -> None:
    three_ranks.run(reduce_in_pairs)


def reduce_asynchronously(rank: int, world_size: int) -> None:
    tensors = [data(rank + 10 * i, 200_000) for i in range(4)]
    works = [zcomm.all_reduce(t, "int8", async_op=True) for t in tensors]
    dist.barrier()  # the default group is free for others meanwhile
    for i, (work, t) in enumerate(zip(works, tensors)):
        assert work is not None
        work.wait()
        assert work.is_completed()
        parts = [data(r + 10 * i, 200_000).double() for r in range(world_size)]
        assert relative_error(t.double(), torch.stack(parts).mean(0)) < 2e-4


def test_async_calls_run_in_order(three_ranks: World) -> None:
    three_ranks.run(reduce_asynchronously)


def reduce_and_gather(rank: int, world_size: int) -> None:
    """Whose second hops are on one channel, and which ranks come to it at different times."""
    for step in range(40):
        late = random.Random(7 * step + rank)
        large, small = torch.full((1_500_000,), float(rank + step)), torch.full((9,), float(rank))
        everyone = torch.empty(9 * world_size)
        time.sleep(0.01 * late.random())
        first = zcomm.all_reduce(large, "none", async_op=True, op="sum")
        time.sleep(0.02 * late.random())
        second = zcomm.all_gather(everyone, small, "none", async_op=True)
        assert first is not None
        assert second is not None
        first.wait()
        second.wait()
        assert (large == 3 + 3 * step).all()
        assert torch.equal(everyone.view(world_size, -1)[:, 0], torch.arange(3.0))


def test_all_gather_waits_for_its_turn_behind_an_all_reduce(three_ranks: World) -> None:
    three_ranks.run(reduce_and_gather)


def reduce_shapes(rank: int, world_size: int) -> None:
    x = data(rank, 6000).view(20, 300)
    zcomm.all_reduce(x, "int8")
    assert same_on_all_ranks(x)
    with torch.inference_mode():
        y = data(rank, 5000).bfloat16()
        zcomm.all_reduce(y, "int8")
        assert same_on_all_ranks(y)
    leaf = torch.ones(2000, requires_grad=True)
    zcomm.all_reduce(leaf, "none")
    assert leaf.requires_grad
    assert leaf.is_leaf


def test_shapes_and_autograd_modes(three_ranks: World) -> None:
    three_ranks.run(reduce_shapes)


def refuse(rank: int, world_size: int) -> dict[str, Raised]:
    x = torch.ones(3000)
    kept = zcomm.Feedback()
    zcomm.all_reduce(x.clone(), "lm4", feedback=kept)
    calls: dict[str, tuple[Any, ...]] = {
        "sign": (zcomm.all_reduce, x, "sign"),
        "codec": (zcomm.all_reduce, x, "lm5"),
        "op": (lambda: zcomm.all_reduce(x, op="max"),),
        "list": (zcomm.all_reduce, [1.0, 2.0]),
        "int": (zcomm.all_reduce, torch.ones(3, dtype=torch.int64)),
        "strided": (zcomm.all_reduce, torch.ones(100, 100).t()),
        "sparse": (zcomm.all_reduce, torch.ones(10).to_sparse()),
        "meta": (zcomm.all_reduce, torch.ones(10, device="meta")),
        "input size": (zcomm.reduce_scatter, torch.ones(10), torch.ones(29)),
        "output size": (zcomm.all_gather, torch.ones(31), torch.ones(10)),
        "dtypes": (zcomm.all_gather, torch.ones(30), torch.ones(10).bfloat16()),
        "overlap": (zcomm.reduce_scatter, x[:1000], x),
        "feedback type": (lambda: zcomm.all_reduce(x, feedback=True),),
        "feedback reuse": (lambda: zcomm.all_reduce(x[:2000].clone(), "lm4", feedback=kept),),
    }
    found = {name: raised(*call) for name, call in calls.items()}
    zcomm.all_reduce(x, "lm4", feedback=kept)  # the group is as good as before
    return found


REFUSALS = {
    "sign": "expected feedback=zcomm.Feedback() with codec 'sign'",
    "codec": "expected one of none",
    "op": "expected op 'mean' or 'sum', got 'max'",
    "list": "expected a tensor, got list",
    "int": "expected dtype torch.float32",
    "strided": "expected contiguous memory",
    "sparse": "expected a dense tensor",
    "meta": "expected a tensor on the CPU or a CUDA device, got one on meta",
    "input size": "expected input of 30 elements (output's 10 for each of 3 ranks), got 29",
    "output size": "expected output of 30 elements",
    "dtypes": "expected input of output's dtype torch.float32, got torch.bfloat16",
    "overlap": "expected input and output in separate memory",
    "feedback type": "expected feedback as a zcomm.Feedback() or None, got True",
    "feedback reuse": "use one zcomm.Feedback() for each tensor",
}


def feedback_of_another_group(rank: int, world_size: int) -> Raised | None:
    x, kept, pair = torch.ones(3000), zcomm.Feedback(), dist.new_group([0, 1])
    zcomm.all_reduce(x, "lm4", feedback=kept)
    if rank == 2:
        return None
    error = raised(lambda: zcomm.all_reduce(x, "lm4", pair, feedback=kept))
    zcomm.all_reduce(x, "lm4", pair, feedback=zcomm.Feedback())
    return error


def test_feedback_of_another_group_is_refused(three_ranks: World) -> None:
    for error in three_ranks.run(feedback_of_another_group)[:2]:
        assert "expected the group that it was first used with" in error.text


def test_bad_arguments_are_refused_before_anything_is_sent(three_ranks: World) -> None:
    for found in three_ranks.run(refuse):
        for name, text in REFUSALS.items():
            assert text in found[name].text, (name, found[name].text)


def test_without_a_process_group_the_remedy_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"expected torch\.distributed\.init_process_group"):
        zcomm.all_reduce(torch.ones(3))
