"""FSDP2 over two hops: gradients and parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_training as training
from ddp_training import ROUNDING, assert_bit_equal, largest
from everyones import everyones
from fsdp_training import Net, compress, mesh_of, sharded, train
from ranks import World
from zcomm import Hierarchy
from zcomm.sharding.hierarchy import Hosts

pytest_plugins = ["zero_ranks"]
PAIRS, ALONE, THREE_HOSTS = [[0, 1], [2, 3]], [[0, 1, 3], [2]], [[1], [0], [3, 2]]
TABLES = pytest.mark.parametrize("table", [PAIRS, ALONE, THREE_HOSTS], ids=str)
Table = list[list[int]]


class Whole(Net):
    """Weights, and so gradients of the sum of its outputs, are whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.middle[1] = nn.Identity()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randint(-2, 3, p.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x))).sum()


def exact_gradients(rank: int, world_size: int, table: Table) -> bool:
    """Whether gradients are the mean over the ranks, bit for bit, with both stages."""
    x = torch.randint(-9, 10, (8, 32), generator=torch.Generator().manual_seed(rank)).float()
    plain = training.seeded(Whole)
    plain(x).backward()
    ranks = everyones({name: p.grad for name, p in plain.named_parameters()})
    same = True
    for stage in (2, 3):
        model = sharded(mesh_of(world_size), stage, Whole)
        handle = compress(model, codec=Hierarchy(across="none", hosts=table))
        assert handle.transport != "shared memory"  # as with one hop
        model(x).backward()
        for name, gradient in training.outcome(model, []).gradients.items():
            assert gradient is not None
            same &= torch.equal(gradient, sum(one[name] for one in ranks) / world_size)
        handle.close()
    return same


@TABLES
def test_gradients_without_codecs_are_exact(quartet: World, table: Table) -> None:
    assert all(quartet.run(exact_gradients, table))


def beside_plain(rank: int, world_size: int, table: Table) -> list[Any]:
    """Plain FSDP2, and with two hops, at both stages."""
    found = []
    for stage in (2, 3):
        mesh = mesh_of(world_size)
        plain, model = sharded(mesh, stage), sharded(mesh, stage)
        handle = compress(model, codec=Hierarchy(across="none", hosts=table), min_numel=0)
        assert handle.transport != "shared memory"  # as with one hop
        found.append((train(plain, rank), train(model, rank)))
        handle.close()
    return found


@TABLES
def test_training_without_codecs_is_plain_fsdp2_to_rounding(quartet: World, table: Table) -> None:
    for stages in quartet.run(beside_plain, table):
        for plain, ours in stages:
            assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
            for name, p in plain.parameters.items():
                torch.testing.assert_close(ours.parameters[name], p, rtol=1e-5, atol=1e-5)


class Trained(NamedTuple):
    gradients: dict[str, Tensor]  # of this rank's first batch, before any reduction
    reduced: dict[str, Any]
    parameters: dict[str, Tensor]
    seen: Tensor  # a parameter as forward sees it
    residual_nbytes: int
    losses: list[float]


def with_codecs(rank: int, world_size: int, table: Table, spec: str) -> Trained:
    model = sharded(mesh_of(world_size))
    compress(model, codec=Hierarchy(across=spec, hosts=table))
    reduced = train(model, rank, steps=1).gradients

    model = sharded(mesh_of(world_size))
    settings: dict[str, Any] = {"feedback": True, "residual_dtype": "fp32", "param_codec": "int8"}
    handle = compress(model, codec=Hierarchy(across=spec, hosts=table), **settings)
    result = train(model, rank, steps=4)
    model.middle[2].unshard()
    seen = model.middle[2].weight.detach().clone()
    local = training.local_gradients(rank)
    found = reduced, result.parameters, seen, handle.residual_nbytes(), result.losses
    return Trained(local, *found)


@pytest.mark.parametrize("spec", ["lm4", "int4"])
@pytest.mark.parametrize("table", [PAIRS, ALONE], ids=str)
def test_sums_of_hosts_are_encoded_once_and_all_ranks_see_the_same(
    quartet: World, table: Table, spec: str
) -> None:
    ranks = quartet.run(with_codecs, table, spec)
    for name, reduced in ranks[0].reduced.items():
        gradients = [one.gradients[name] for one in ranks]
        assert torch.equal(reduced, training.expected_gradient(gradients, spec, table)), name
    for rank, one in enumerate(ranks):
        assert_bit_equal(one.parameters, ranks[0].parameters)
        assert torch.equal(one.seen, ranks[0].seen)
        assert one.losses[-1] < one.losses[0]
        assert one.residual_nbytes == 4 * encoded_numel(Hosts(table, rank).owners)


def encoded_numel(owners: tuple[int, ...]) -> int:
    """The elements that these ranks own of all parameters with a codec."""
    shapes = [p.shape for p in Net().parameters() if p.numel() >= 100]
    cuts = [torch.empty(shape, device="meta").split(-(-shape[0] // 4)) for shape in shapes]
    return sum(parts[owner].numel() for parts in cuts for owner in owners if owner < len(parts))


# Two replicas, each of three ranks on two hosts.


@pytest.fixture(scope="module")
def six() -> Any:
    with World(6) as world:
        yield world


REPLICAS, HOSTS_OF_SIX = [[0, 1, 2], [3, 4, 5]], [[0, 1], [2], [3], [4, 5]]
FED_BACK: dict[str, Any] = {"feedback": True, "residual_dtype": "fp32"}


def replicas(rank: int, world_size: int, folder: Path) -> Any:
    mesh = DeviceMesh("cpu", REPLICAS, mesh_dim_names=("replicate", "shard"))
    model, plain = sharded(mesh), sharded(mesh)
    exact = compress(model, codec=Hierarchy(across="none", hosts=HOSTS_OF_SIX))
    same = train(plain, rank), train(model, rank)
    exact.close()
    handle = compress(model, codec=Hierarchy(across="lm2", hosts=HOSTS_OF_SIX), **FED_BACK)
    result = train(model, rank)
    dcp.save({"zcomm": handle}, checkpoint_id=folder)
    others = [
        compress(sharded(of), codec=Hierarchy(across="lm2", hosts=hosts), **FED_BACK)
        for of, hosts in ((mesh, HOSTS_OF_SIX), (mesh_of(world_size), 3))
    ]
    for other in others:
        dcp.load({"zcomm": other}, checkpoint_id=folder)
    return same, result.parameters, *map(residual_sums, (handle, *others))


def residual_sums(handle: Any) -> dict[str, Tensor]:
    """Over all ranks."""
    rows = {n: row.values().double() for n, row in handle.state_dict()["residuals"].items()}
    ranks = everyones(rows)
    return {name: sum(one[name] for one in ranks) for name in rows}


def test_replicas_over_hosts_stay_equal_and_lose_no_residual(six: World, tmp_path: Path) -> None:
    ranks = six.run(replicas, tmp_path)
    for (plain, ours), parameters, of_replicas, again, flat in ranks:
        assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
        assert_bit_equal(parameters, ranks[0][1])
        assert_bit_equal(again, of_replicas)
        for name, expected in of_replicas.items():
            expected = expected / 2  # the mean over two replicas
            assert largest(expected) > 0
            assert largest(flat[name] - expected) <= ROUNDING * largest(expected), name
