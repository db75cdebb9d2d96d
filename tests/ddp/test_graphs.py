"""Kinds of backward: unused parts, collectives in between, two models, compiled, sparse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import (
    LM4,
    ROUNDING,
    Books,
    Branches,
    Net,
    Outcome,
    assert_equal_replicas,
    batch,
    outcome,
    seeded,
    train,
)
from ranks import World

pytest_plugins = ["ddp_ranks"]


def steps_with_a_branch_unused(
    rank: int, world_size: int, feedback: bool | float, scaled: bool
) -> Any:
    """Uses both branches twice, `middle` alone twice, then both again."""
    net = seeded(Branches)
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    handle = zcomm.compress(ddp, "lm4", feedback=feedback, scaler=scaler)
    seen = []
    for step, net.branch in enumerate(["both", "both", "middle", "middle", "both"]):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        seen.append((outcome(ddp).gradients, handle.state_dict()["residuals"]))
    return seen


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("feedback", [True, 0.5])
def test_parameters_that_no_rank_uses_keep_their_residuals(
    pair: World, feedback: bool | float, scaled: bool
) -> None:
    for seen in pair.run(steps_with_a_branch_unused, feedback, scaled):
        gradients, residuals = zip(*seen)
        for step in (2, 3):
            assert gradients[step]["other.weight"] is None
            assert gradients[step]["other.bias"] is None
            for hop in ("sent", "owned"):
                kept = residuals[1][hop]["other.weight"]
                assert kept.any()
                assert torch.equal(residuals[step][hop]["other.weight"], kept)
                before, after = (residuals[s][hop]["middle.weight"] for s in (step - 1, step))
                assert not torch.equal(before, after)
        assert gradients[4]["other.weight"] is not None
        assert not torch.equal(residuals[4]["sent"]["other.weight"], kept)


def branches_that_differ(rank: int, world_size: int) -> Any:
    """In steps 2 and 3, rank 1 uses `other` and rank 0 does not."""
    net = seeded(Branches)
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    handle = zcomm.compress(ddp, "lm4", feedback=True)
    books, seen = Books(ddp, handle), []
    for step in range(5):
        net.branch = "middle" if rank == 0 and step in (2, 3) else "both"
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        books.close_step()
        seen.append(handle.state_dict()["residuals"]["sent"]["other.weight"])
    return outcome(ddp, books), seen


def test_a_parameter_that_one_rank_does_not_use(pair: World) -> None:
    results = pair.run(branches_that_differ)
    assert_equal_replicas([trained for trained, _ in results])
    assert all(trained.gap < ROUNDING for trained, _ in results)
    (_, idle), (_, busy) = results
    assert torch.equal(idle[1], idle[3])
    assert not torch.equal(busy[1], busy[3])


class Talkative(Net):
    """Calls all_reduce on the default group while DDP's buckets are in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[Tensor] = []

    def talk(self, gradient: Tensor) -> None:
        self.sums.append(torch.full((5000,), float(dist.get_rank() + 1)))
        dist.all_reduce(self.sums[-1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x.register_hook(self.talk)
        x = self.middle(x).tanh()
        x.register_hook(self.talk)
        return self.last(x)


def train_talkative(rank: int, world_size: int) -> tuple[Outcome, list[Tensor]]:
    net = seeded(Talkative)
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.02)
    return train(ddp, rank, zcomm.compress(ddp, **LM4), steps=8), net.sums


def test_a_users_all_reduce_during_backward(pair: World) -> None:
    results = pair.run(train_talkative)
    assert_equal_replicas([trained for trained, _ in results])
    for trained, sums in results:
        assert trained.gap < ROUNDING
        assert len(sums) == 16
        assert all(torch.equal(total, torch.full((5000,), 3.0)) for total in sums)


def train_two(rank: int, world_size: int, one_graph: bool) -> list[Outcome]:
    encoder = DistributedDataParallel(seeded(lambda: nn.Linear(32, 280)))
    decoder = DistributedDataParallel(seeded(Net).middle, bucket_cap_mb=0.02)
    books = [Books(ddp, zcomm.compress(ddp, **LM4)) for ddp in (encoder, decoder)]
    for step in range(4):
        encoder.zero_grad()
        decoder.zero_grad()
        if one_graph:
            decoder(encoder(batch(rank, step)).tanh()).square().mean().backward()
        else:
            encoder(batch(rank, step)).square().mean().backward()
            decoder(batch(rank, step, 8, 280)).square().mean().backward()
        for book in books:
            book.close_step()
    return [outcome(encoder, books[0]), outcome(decoder, books[1])]


@pytest.mark.parametrize("one_graph", [False, True])
def test_two_models_in_one_process(pair: World, one_graph: bool) -> None:
    for outcomes in zip(*pair.run(train_two, one_graph)):
        assert_equal_replicas(list(outcomes))
        assert all(0 < trained.gap < ROUNDING for trained in outcomes)


def train_compiled(rank: int, world_size: int) -> tuple[Outcome, int]:
    graphs = []

    def backend(graph, inputs):  # type: ignore[no-untyped-def]
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    model = torch.compile(DistributedDataParallel(seeded(Net)), backend=backend)
    return train(model, rank, zcomm.compress(model, **LM4)), len(graphs)


def test_a_compiled_model(pair: World) -> None:
    results = pair.run(train_compiled)
    assert_equal_replicas([trained for trained, _ in results])
    for trained, graphs in results:
        assert 0 < trained.gap < ROUNDING
        assert graphs


def train_sparse(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(
        nn.Sequential(nn.Embedding(500, 16, sparse=True), nn.Linear(16, 100))
    )
    try:
        zcomm.compress(ddp, "lm4")
        ddp(torch.tensor([1, 2 + rank])).sum().backward()
    except ValueError as error:
        return str(error)
    return "trained"


def test_sparse_gradients_are_refused(pair: World) -> None:
    for message in pair.run(train_sparse):
        assert "sparse" in message
