"""What each setting of the hook does, and that communication overlaps with backward."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ranks import World
from zcomm.sharding.settings import Settings
from zcomm.transport.channels import group_timeout_s

GROUP_TIMEOUT_S = 23.0


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2, group_timeout_s=GROUP_TIMEOUT_S) as world:
        yield world


def compressed(
    *modules: nn.Module, **settings: Any
) -> tuple[DistributedDataParallel, zcomm.Handle]:
    ddp = DistributedDataParallel(nn.Sequential(*modules), bucket_cap_mb=0.1)
    return ddp, zcomm.compress(ddp, **{"codec": "lm4", **settings})


def wire_bytes_of_steps(rank: int, world_size: int) -> list[int]:
    ddp, handle = compressed(nn.Linear(100, 100), start_step=2)
    totals = [0]
    for _ in range(4):
        ddp(torch.randn(4, 100)).sum().backward()
        totals.append(handle.stats().wire_bytes)
    return [after - before for before, after in zip(totals, totals[1:])]


def test_steps_before_start_step_go_uncompressed(pair: World) -> None:
    for first, second, third, fourth in pair.run(wire_bytes_of_steps):
        # Each of two ranks sends half the fp32 bytes, twice; then an eighth, and the bias as fp32.
        assert first == second >= 4 * 10_100
        assert third == fourth < first / 6


def codecs_of(rank: int, world_size: int, settings: dict[str, Any]) -> dict[str, str]:
    _, handle = compressed(nn.Linear(100, 100), nn.Linear(100, 20), **settings)
    return handle.state_dict()["codecs"]


def test_patterns_and_min_numel_choose_the_codecs(pair: World) -> None:
    names = ("0.weight", "0.bias", "1.weight", "1.bias")
    cases = [
        ({}, ("lm4", "none", "lm4", "none")),
        ({"min_numel": 0}, ("lm4",) * 4),
        ({"min_numel": 5000}, ("lm4", "none", "none", "none")),
        ({"codec": {"1.*": "int8", "*": "lm2"}}, ("lm2", "none", "int8", "none")),
    ]
    for settings, expected in cases:
        for found in pair.run(codecs_of, settings):
            assert found == dict(zip(names, expected)), settings


def test_name_that_no_pattern_matches_is_refused(pair: World) -> None:
    with pytest.raises(
        AssertionError, match=r"expected a pattern that matches parameter '0\.bias'"
    ):
        pair.run(codecs_of, {"codec": {"*.weight": "lm4"}})


def chunks_and_buffers(rank: int, world_size: int, chunk_mb: float | None) -> tuple[int, int]:
    """For one bucket with 48 MB of gradients, as in DDP's first iteration."""
    ddp, handle = compressed(nn.Linear(3000, 4000), codec="none", chunk_mb=chunk_mb)
    ddp(torch.randn(1, 3000)).sum().backward()
    parts = handle._compressor.buckets._parts.values()
    chunks = sum(len(part.chunks) for of_bucket in parts for part in of_bucket)
    return chunks, handle.buffer_nbytes()


def test_chunks_bound_the_buffers_in_the_first_iteration(pair: World) -> None:
    for chunks, nbytes in pair.run(chunks_and_buffers, None):
        assert chunks > 10
        assert nbytes <= 50 * 2**20
    for chunks, nbytes in pair.run(chunks_and_buffers, 1.0):
        assert chunks > 40
        assert nbytes <= 8 * 2**20


def default_timeout(rank: int, world_size: int) -> float:
    return group_timeout_s(None)


def test_default_timeout_is_the_groups(pair: World) -> None:
    assert pair.run(default_timeout) == [GROUP_TIMEOUT_S] * 2


def bytes_sent_before_the_end(rank: int, world_size: int) -> tuple[int, int]:
    ddp, handle = compressed(nn.Linear(200, 500), nn.Linear(500, 300), codec="int8")
    for _ in range(2):  # DDP rebuilds its buckets before the second
        ddp(torch.randn(4, 200)).sum().backward()
    before = handle.stats().wire_bytes
    during = []

    def look(grad: torch.Tensor) -> None:
        deadline = time.monotonic() + 10
        while handle.stats().wire_bytes == before and time.monotonic() < deadline:
            time.sleep(0.01)
        during.append(handle.stats().wire_bytes - before)

    # The first layer's gradient comes last: by then the other bucket is in flight.
    ddp.module[0].weight.register_hook(look)
    ddp(torch.randn(4, 200)).sum().backward()
    return during[0], handle.stats().wire_bytes - before


def test_buckets_are_sent_while_backward_goes_on(pair: World) -> None:
    for during, all_of_it in pair.run(bytes_sent_before_the_end):
        assert 0 < during < all_of_it


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"threads": 1_000_000}, r"threads <= 1024, got 1000000: .*; use None for torch's number"),
        ({"chunk_mb": 1e9}, r"chunk_mb: expected at most 1024, got 1000000000\.0: .*; omit it"),
        ({"chunk_mb": float("nan")}, "chunk_mb: expected at least 0.0625, got nan"),
        ({"chunk_mb": 1 / 32}, "chunk_mb: expected at least 0.0625, got 0.03125"),
    ],
    ids=str,
)
def test_settings_out_of_range_say_why(setting: dict[str, Any], says: str) -> None:
    for make in (zcomm.HookState, Settings):
        with pytest.raises(ValueError, match=says):
            make("lm4", **setting)
    Settings("lm4", threads=1024, chunk_mb=1024)


@pytest.mark.parametrize("settings", [{"codec": "lm4", "feedback": 0.9}, {"codec": "sign"}])
def test_a_decay_needs_residuals_that_can_be_averaged(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"with a decay, got torch\.int8 with feedback=0"):
        zcomm.Settings(**settings, residual_dtype=torch.int8)
    zcomm.Settings(**{**settings, "feedback": True}, residual_dtype=torch.int8)
