"""compress, HookState and the handle: what they refuse, count, save and load."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import (
    ROUNDING,
    Net,
    Outcome,
    assert_bit_equal,
    assert_equal_replicas,
    batch,
    outcome,
    seeded,
    train,
)
from ranks import OVER_GLOO, World
from zcomm.transport.shared_memory.ring import segment_nbytes

pytest_plugins = ["ddp_ranks"]

NUMEL = sum(p.numel() for p in Net().parameters())
COMPRESSED = {"first.weight": 32 * 280, "middle.weight": 280 * 260, "last.weight": 260 * 10}


def wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(seeded(Net), bucket_cap_mb=0.02)


def step(ddp: Any, rank: int = 0, number: int = 0) -> None:
    ddp(batch(rank, number)).square().mean().backward()


def refusal(act: Callable[[], Any]) -> tuple[str, str]:
    """The type and the message of the error that act() raises."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def registered_state(rank: int, world_size: int) -> tuple[Outcome, Any, str]:
    ddp, state = wrapped(), zcomm.HookState("lm4", feedback=True)
    before = refusal(lambda: state.handle)
    ddp.register_comm_hook(state, zcomm.hook)
    return train(ddp, rank, state), before, repr(state.handle)


def test_a_registered_state_has_a_handle_after_its_first_bucket(pair: World) -> None:
    results = pair.run(registered_state)
    assert_equal_replicas([trained for trained, *_ in results])
    for trained, (kind, message), text in results:
        assert 0 < trained.gap < ROUNDING
        assert kind == "RuntimeError"
        assert "expected at least one backward() before" in message
        assert "lm4" in text
        assert text.endswith("step 4, 2 ranks; shared memory>")


def different_settings(rank: int, world_size: int, by_compress: bool) -> Any:
    ddp, codec = wrapped(), ("lm4", "int8")[rank]
    if by_compress:
        return refusal(lambda: zcomm.compress(ddp, codec))
    ddp.register_comm_hook(zcomm.HookState(codec), zcomm.hook)
    return refusal(lambda: step(ddp))


@pytest.mark.parametrize("by_compress", [True, False])
def test_settings_that_differ_are_refused_on_every_rank(pair: World, by_compress: bool) -> None:
    for rank, (kind, message) in enumerate(pair.run(different_settings, by_compress)):
        assert kind == "ValueError"
        assert message.startswith(f"rank {rank}: expected the same codec on all ranks")
        assert "rank 0: {'*': 'lm4'}" in message
        assert "rank 1: {'*': 'int8'}" in message


def closed_before_the_first_step(rank: int, world_size: int, static_graph: bool) -> Any:
    ddp = DistributedDataParallel(seeded(Net), static_graph=static_graph)
    zcomm.compress(ddp, "lm4").close()
    return refusal(lambda: step(ddp))


@pytest.mark.parametrize("static_graph", [False, True])
def test_backward_after_close_is_an_error_and_no_hang(pair: World, static_graph: bool) -> None:
    for _, message in pair.run(closed_before_the_first_step, static_graph, timeout_s=200):
        assert "the engine was stopped" in message


def copied(rank: int, world_size: int) -> list[tuple[str, str]]:
    ddp = wrapped()
    zcomm.compress(ddp, "lm4")
    step(ddp, rank)
    return [
        refusal(lambda: step(copy.deepcopy(ddp), rank)),
        refusal(lambda: step(pickle.loads(pickle.dumps(ddp)), rank)),
    ]


def test_a_model_with_a_hook_can_be_copied(pair: World) -> None:
    """Like plain DDP: for a moving average, or with torch.save."""
    for refused in pair.run(copied):
        assert refused == [("no error", "")] * 2


def copied_with_its_handle(rank: int, world_size: int) -> list[Any]:
    """Copies of a module that has the handle, and of its DDP model; and what their handles say."""
    ddp = wrapped()
    ddp.handle = ddp.module.handle = zcomm.compress(ddp, "lm4")
    step(ddp, rank)
    file = io.BytesIO()
    torch.save(ddp.module, file)
    file.seek(0)
    copies = [copy.deepcopy(ddp.module), torch.load(file, weights_only=False), copy.deepcopy(ddp)]
    again = copy.deepcopy(copies[0])
    for one in (*copies, again):
        step(one, rank)
    assert_bit_equal(dict(again.state_dict()), dict(ddp.module.state_dict()))
    zcomm.compress(copies[2], "lm4")
    return [*(refusal(one.handle.stats) for one in copies), repr(again.handle), ddp.handle.stats()]


def test_a_model_with_its_handle_can_be_copied_and_saved(pair: World) -> None:
    for *refused, text, stats in pair.run(copied_with_its_handle):
        for kind, message in refused:
            assert kind == "RuntimeError"
            assert "got that of its copy, which has no hook" in message
        assert text == "<zcomm.Handle: of a copy, which has no hook>"
        assert stats.steps == 1


def engines_after_the_model(rank: int, world_size: int) -> tuple[int, int]:
    def engines() -> int:
        return sum(thread.name == "zcomm-engine" for thread in threading.enumerate())

    gc.collect()
    time.sleep(0.1)
    before = engines()
    ddp = wrapped()
    zcomm.compress(ddp, "lm4")
    step(ddp)
    alive = engines() - before
    del ddp
    gc.collect()
    deadline = time.monotonic() + 5
    while (left := engines() - before) > 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive, left


def test_the_engine_ends_with_its_model(pair: World) -> None:
    for alive, left in pair.run(engines_after_the_model):
        assert alive == 1
        assert left <= 0


SEGMENT_NBYTES = segment_nbytes(2)


def counted(rank: int, world_size: int) -> Any:
    ddp = wrapped()
    handle = zcomm.compress(ddp, "lm4", feedback=True)
    seen = [handle.stats()]
    for number in range(3):
        step(ddp, rank, number)
        seen.append(handle.stats())
    return seen, handle.residual_nbytes(), handle.buffer_nbytes()


def test_stats_count_steps_and_bytes(pair: World) -> None:
    results = pair.run(counted)
    for seen, _, buffer_nbytes in results:
        assert [stats.steps for stats in seen] == [0, 1, 2, 3]
        assert [stats.raw_bytes for stats in seen] == [n * 4 * NUMEL for n in range(4)]
        wires = [stats.wire_bytes for stats in seen]
        assert wires[1] > 0
        assert wires[3] - wires[2] == wires[2] - wires[1]
        assert 6 < seen[3].ratio < 8
        assert seen[0].ratio == 1.0
        for name in ("encode_s", "wait_s", "decode_s", "exposed_s"):
            assert 0 < getattr(seen[2], name) < getattr(seen[3], name)
        assert 0 < buffer_nbytes - SEGMENT_NBYTES < 4 * NUMEL
        assert all(stats.shared_bytes == stats.wire_bytes for stats in seen)
    # All elements on each rank, plus the run it owns.
    assert sum(nbytes for _, nbytes, _ in results) == 3 * 4 * sum(COMPRESSED.values())


def transport(rank: int, world_size: int, codec: Any) -> tuple[str, int, int]:
    ddp = wrapped()
    handle = zcomm.compress(ddp, codec)
    step(ddp, rank)
    assert repr(handle).endswith(f"; {handle.transport}>")
    return handle.transport, handle.stats().shared_bytes, handle.stats().wire_bytes


def test_a_handle_says_what_gradients_go_over(pair: World) -> None:
    for text, shared_nbytes, wire_nbytes in pair.run(transport, "lm4"):
        assert text == "shared memory"
        assert shared_nbytes == wire_nbytes > 0
    with World(2, env=OVER_GLOO) as world:
        for text, shared_nbytes, wire_nbytes in world.run(transport, "lm4"):
            assert text.startswith("gloo: rank 0: ZCOMM_SHM=0 turns shared memory off; rank 1: ")
            assert shared_nbytes == 0 < wire_nbytes


class Run:
    """A model, its optimizer and scaler, and the handle: everything a checkpoint saves."""

    def __init__(self, settings: dict[str, Any], scaled: bool) -> None:
        self.ddp = wrapped()
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.5, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", 8.0, growth_interval=5, enabled=scaled)
        scaler = self.scaler if scaled else None
        self.handle = zcomm.compress(self.ddp, scaler=scaler, **settings)
        self.parts = (self.ddp.module, self.optimizer, self.scaler, self.handle)

    def train(self, rank: int, numbers: range) -> None:
        for number in numbers:
            self.optimizer.zero_grad()
            loss = self.ddp(batch(rank, number)).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()


def saved_and_continued(rank: int, world_size: int, settings: dict[str, Any], scaled: bool) -> Any:
    """Ten steps without a break, and the last five in a run that loaded the first five."""
    straight, loaded, file = Run(settings, scaled), Run(settings, scaled), io.BytesIO()
    straight.train(rank, range(5))
    torch.save([part.state_dict() for part in straight.parts], file)
    straight.train(rank, range(5, 10))
    file.seek(0)
    for part, state in zip(loaded.parts, torch.load(file, weights_only=True)):
        part.load_state_dict(state)
    loaded.train(rank, range(5, 10))
    return [(outcome(run.ddp), run.handle.state_dict()) for run in (straight, loaded)]


@pytest.mark.parametrize(
    ("settings", "scaled"),
    [
        ({"codec": "lm4", "feedback": True}, False),
        ({"codec": "lm4", "feedback": True}, True),  # saved just after the scale changed
        ({"codec": "lm4", "feedback": 0.5, "residual_dtype": torch.bfloat16}, False),
        ({"codec": "int8", "feedback": True, "residual_dtype": torch.int8}, False),
        ({"codec": {"middle.*": "topk:0.05", "*": "sign"}}, False),
        ({"codec": "lm4", "feedback": True, "start_step": 7}, False),
    ],
    ids=str,
)
def test_a_loaded_state_continues_bit_for_bit(
    pair: World, settings: dict[str, Any], scaled: bool
) -> None:
    for (trained, state), (loaded, same_state) in pair.run(saved_and_continued, settings, scaled):
        assert_bit_equal(loaded.parameters, trained.parameters)
        assert_bit_equal(loaded.gradients, trained.gradients)
        assert_bit_equal(same_state, state)
        assert state["step"] == 10
        assert state["scale"] == (16.0 if scaled else 1.0)


def refused_states(rank: int, world_size: int) -> Any:
    ddp = wrapped()
    handle = zcomm.compress(ddp, "lm4", feedback=True)
    step(ddp, rank)
    state = handle.state_dict()
    renamed = {name.replace("last", "final"): spec for name, spec in state["codecs"].items()}
    shorter = {
        hop: {**held, "last.weight": held["last.weight"][1:]}
        for hop, held in state["residuals"].items()
    }
    wrong = {
        "codec": state | {"codecs": state["codecs"] | {"last.weight": "int8"}},
        "world size": state | {"world_size": 3},
        "rank": state | {"rank": 1 - rank},
        "names": state | {"codecs": renamed},
        "version": state | {"version": 0},
        "shape": state | {"residuals": shorter},
        "no residuals": state | {"residuals": {"sent": {}, "owned": {}}},
    }
    refused = {
        name: refusal(lambda other=other: handle.load_state_dict({**other, "step": 77}))
        for name, other in wrong.items()
    }
    return refused, state, handle.state_dict()


def test_states_of_another_run_are_refused_and_change_nothing(pair: World) -> None:
    for rank, (refused, before, after) in enumerate(pair.run(refused_states)):
        for name, message in {
            "codec": "expected codecs 'last.weight': 'lm4', got 'int8'",
            "world size": "expected world_size 2, got 3",
            "rank": f"expected rank {rank}, got {1 - rank}",
            "names": "expected codecs 'final.bias': None, got 'none'",
            "version": "expected version 2, got 0",
            "shape": "'last.weight' (sent): expected (2600,) torch.float32, got (2599,) torch.",
            "no residuals": "expected those of the same parameters",
        }.items():
            kind, text = refused[name]
            assert kind == "ValueError", name
            assert message in text
        assert_bit_equal(after, before)
