"""codec="auto" on real ranks: on one host, between hosts, through failures and restarts."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import zcomm
from everyones import everyones
from raised import Raised, raised
from ranks import OVER_GLOO, World
from zcomm import cli
from zcomm.engine.tuning import measure
from zcomm.engine.tuning.check import FIRST_STEP, STEPS
from zcomm.launch import hosts

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
TIMEOUT_S = 4.0
CHECKED = FIRST_STEP + STEPS + 2


def wrapped(width: int = 300) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(width, width), nn.Linear(width, 10)))


def train(ddp: DistributedDataParallel, steps: int, rank: int) -> torch.Tensor:
    """SGD on each rank's own data; returns all parameters."""
    optimizer = optim.SGD(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        width = ddp.module[0].in_features
        ddp(torch.randn(4, width, generator=generator)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])


# One host.


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2) as world:
        yield world


def one_host(rank: int, world_size: int) -> tuple[str, str, dict[str, str], bool]:
    ddp = wrapped()
    handle = zcomm.compress(ddp)
    same = all(torch.equal(train(ddp, 2, rank), other) for other in everyones(train(ddp, 2, rank)))
    state = handle.state_dict()
    handle.close()
    return handle.choice.codec, handle.choice.reason, state["codecs"], same


def test_on_one_host_it_is_exact_without_measuring(pair: World) -> None:
    for codec, reason, codecs, _ in pair.run(one_host):
        assert codec == "none"
        assert "all ranks are on one host (shared memory)" in reason
        assert set(codecs.values()) == {"none"}


def no_choice(rank: int, world_size: int) -> Any:
    return zcomm.compress(wrapped(), codec="int8").choice


def test_a_given_codec_leaves_nothing_to_choose(pair: World) -> None:
    assert pair.run(no_choice) == [None, None]


def other_codec_on_one_rank(rank: int, world_size: int) -> Raised:
    return raised(zcomm.compress, wrapped(), codec="auto" if rank else "lm4")


def test_ranks_that_differ_about_auto_are_refused() -> None:
    with World(2) as world:
        for error in world.run(other_codec_on_one_rank):
            assert error.is_value_error
            assert "expected the same codec on all ranks" in error.text


# Between hosts.


def over_network(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """All that two hosts of two ranks can show in one run."""
    found: dict[str, Any] = {}
    ddp = wrapped()
    began = time.perf_counter()
    handle = zcomm.compress(ddp)
    found["seconds"] = time.perf_counter() - began
    first = handle.choice
    found["first"], found["measured"] = first.codec, first.measured_s
    found["reason"] = first.reason
    trained = train(ddp, CHECKED, rank)
    found["replicas agree"] = all(torch.equal(trained, other) for other in everyones(trained))
    found["at"], found["codec"] = handle.choice.step, handle.choice.codec
    found["steps known"] = all(one.step_s for one in handle.choice.options)
    state = handle.state_dict()
    handle.close()
    # A resumed run keeps what was chosen, whatever it would choose itself.
    saved = zcomm.engine.tuning.choice.Choice.loads(state["choice"])
    other = "bf16" if saved.codec != "bf16" else "int8"
    state["choice"] = saved.with_codec(other).dumps()
    state["codecs"] = {n: other if c == saved.codec else c for n, c in state["codecs"].items()}
    again = wrapped()
    resumed = zcomm.compress(again)
    resumed.load_state_dict(state)
    found["resumed"] = resumed.choice.codec == other
    found["its codecs"] = resumed.state_dict()["codecs"] == state["codecs"]
    train(again, CHECKED, rank)
    found["settled"] = resumed.choice.codec == other
    resumed.close()
    # Saved on other hosts: it keeps its own choice.
    third = zcomm.compress(wrapped())
    mine = third.choice.codec
    elsewhere = dataclasses.replace(saved.with_codec(other), hosts="[0, 1, 0, 1]").dumps()
    third.load_state_dict({**state, "choice": elsewhere})
    found["anew"] = third.choice.codec == mine
    third.close()
    # ZeRO and patterns.
    zero = zcomm.ZeroOptimizer(wrapped(), optim.SGD, codec="auto", lr=0.1)
    found["zero"] = zero.handle.choice.codec
    zcomm.save_checkpoint(folder, {"optimizer": zero}, 1)
    loaded = zcomm.ZeroOptimizer(wrapped(), optim.SGD, codec="auto", lr=0.1)
    zcomm.load_checkpoint(folder, {"optimizer": loaded})
    found["zero resumed"] = loaded.handle.choice.codec == zero.handle.choice.codec
    zero.close()
    loaded.close()
    dict_handle = zcomm.compress(wrapped(), codec={"0.*": "auto", "*": "bf16"}, min_numel=0)
    codecs = dict_handle.state_dict()["codecs"]
    found["patterns"] = {codecs["1.weight"], codecs["0.weight"]} == {
        "bf16",
        dict_handle.choice.codec,
    }
    dict_handle.close()
    return found


@needs_root
def test_it_measures_chooses_and_stays_with_it(tmp_path: Path) -> None:
    every = hosts.run(4, over_network, str(tmp_path), hosts=2, rate="200mbit")
    for key in ("first", "codec", "at", "zero", "measured"):
        assert len({str(found[key]) for found in every}) == 1, key
    for found in every:
        # 0.4 MB of gradients at 200 Mbit/s: fewer bits are faster, and nothing hides them.
        assert found["first"] in ("int8", "lm4"), found["reason"]
        assert "between 2 hosts" in found["reason"]
        assert found["at"] >= FIRST_STEP + STEPS
        for key in ("replicas agree", "steps known", "resumed", "its codecs", "settled", "anew"):
            assert found[key], key
        assert found["zero resumed"]
        assert found["patterns"]


# Failures while it measures. Over gloo, two ranks of this machine count as two hosts.


def fail_while_measuring(rank: int, world_size: int, how: str, where: str) -> Raised:
    os.environ["HOSTNAME_OF_TEST"] = str(rank)
    make_hosts_differ(rank)
    ddp = wrapped()
    if rank == 1:
        function = getattr(measure, where)

        def fail(*args: Any) -> Any:
            if how == "die":
                os._exit(9)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "raise":
                raise OSError("no memory")
            return function(*args)

        setattr(measure, where, fail)
    return raised(zcomm.compress, ddp, timeout_s=TIMEOUT_S)


def make_hosts_differ(rank: int) -> None:
    """Gives this rank a host of its own, as its peers see it."""
    import zcomm.sharding.hierarchy as hierarchy
    from zcomm.base.host import this_host

    mine = this_host()
    hierarchy.this_host = lambda: mine._replace(network=str(rank))  # type: ignore[attr-defined]


def test_a_rank_that_raises_while_measuring_ends_the_call_on_all() -> None:
    with World(3, env=OVER_GLOO) as world:
        found = world.run(fail_while_measuring, "raise", "_rows")
    assert (found[1].type, found[1].text) == ("OSError", "no memory")
    for rank in (0, 2):
        assert found[rank].type == "CommunicationError"
        assert "rank 1" in found[rank].text
        assert found[rank].seconds < TIMEOUT_S + 3


def deterministic(rank: int, world_size: int, ranks: list[int]) -> Raised:
    make_hosts_differ(rank)
    torch.use_deterministic_algorithms(rank in ranks)
    ddp = wrapped()
    zcomm.compress(wrapped(), codec="none").close()
    return raised(zcomm.compress, ddp)


def test_deterministic_algorithms_refuse_to_measure() -> None:
    with World(2, env=OVER_GLOO) as world:
        for error in world.run(deterministic, [0, 1]):
            assert error.is_value_error
            assert "codec='auto': expected use_deterministic_algorithms(False)" in error.text
    with World(2, env=OVER_GLOO) as world:
        for error in world.run(deterministic, [1]):
            assert "expected the same deterministic on all ranks" in error.text


def random_numbers(rank: int, world_size: int) -> tuple[bool, str]:
    make_hosts_differ(rank)
    torch.set_default_dtype(torch.float64)
    ddp = DistributedDataParallel(nn.Linear(300, 300, dtype=torch.float32))
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    handle = zcomm.compress(ddp)
    found = torch.equal(torch.rand(3), expected)
    doubles = zcomm.compress(DistributedDataParallel(nn.Linear(300, 300)))
    assert handle.choice is not None
    assert "between 2 hosts" in handle.choice.reason
    assert doubles.choice is not None
    return found, doubles.choice.reason


def test_measuring_leaves_the_users_random_numbers_and_defaults_alone() -> None:
    with World(2, env=OVER_GLOO) as world:
        for same, of_doubles in world.run(random_numbers):
            assert same
            assert of_doubles == "nothing is sent that it could choose for"


@pytest.mark.parametrize("where", ["_codec_costs", "_bytes_per_s", "_rows"])
@pytest.mark.parametrize("how", ["die", "stop"])
def test_a_rank_lost_while_measuring_is_named_in_time(how: str, where: str) -> None:
    with World(3, env=OVER_GLOO) as world:
        found = world.run(fail_while_measuring, how, where, expect_dead=[1])
    for rank in (0, 2):
        assert found[rank].type == "CommunicationError"
        assert "rank 1" in found[rank].text
        assert found[rank].seconds < TIMEOUT_S + 3


def measure_unlike_links(rank: int, world_size: int) -> tuple[str, list[str], bool]:
    """All that rank 1 measures takes ten times as long."""
    make_hosts_differ(rank)
    exchanged = measure._Together.everyones

    def unlike(together: Any, *mine: float) -> torch.Tensor:
        return exchanged(together, *((10 if rank == 1 else 1) * s for s in mine))

    measure._Together.everyones = unlike  # type: ignore[method-assign]
    ddp = wrapped()
    handle = zcomm.compress(ddp)
    codecs = sorted(set(handle.state_dict()["codecs"].values()))
    trained = train(ddp, 3, rank)
    same = all(torch.equal(trained, other) for other in everyones(trained))
    dist.barrier()
    handle.close()
    return handle.choice.dumps(), codecs, same


def test_ranks_that_measure_different_links_agree_on_one_choice() -> None:
    with World(3, env=OVER_GLOO) as world:
        every = world.run(measure_unlike_links)
    assert len({choice for choice, *_ in every}) == 1
    assert len({str(codecs) for _, codecs, _ in every}) == 1
    assert all(same for *_, same in every)


# FSDP2, and the command.


def sharded(rank: int, world_size: int) -> tuple[str, str, bool]:
    from torch.distributed.fsdp import fully_shard

    make_hosts_differ(rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(model)
    handle = zcomm.fsdp.compress(model, min_numel=0)
    model(torch.randn(4, 64)).sum().backward()
    assert handle.choice is not None
    mine = handle.choice
    state = handle.state_dict()
    other = mine.with_codec("bf16" if mine.codec != "bf16" else "int8")
    about = json.loads(state["about"])
    about["choice"] = other.dumps()
    for name, spec in about["codecs"].items():
        about["codecs"][name] = other.codec if spec == mine.codec else spec
    handle.load_state_dict({**state, "about": json.dumps(about)})
    model(torch.randn(4, 64)).sum().backward()
    resumed = handle.choice == other and json.loads(handle.state_dict()["about"])["codecs"]
    return mine.codec, mine.reason, resumed == about["codecs"]


def test_fsdp_chooses_once_and_keeps_what_a_checkpoint_chose() -> None:
    with World(2, env=OVER_GLOO) as world:
        every = world.run(sharded)
    assert len({codec for codec, *_ in every}) == 1
    for _, reason, resumed in every:
        assert "between 2 hosts" in reason
        assert resumed


def test_the_command_shows_what_it_would_choose(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--measure", "--params", "1M", "--world", "2"]) == 0
    shown = capsys.readouterr().out
    assert "codec='auto': all ranks are on one host (shared memory)" in shown
    assert cli.main(["plan", "--measure", "--params", "1M"]) == 2


@needs_root
def test_the_command_measures_emulated_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--measure", "--params", "5M", "--world", "2", "--hosts", "2"]
    assert cli.main([*command, "--net", "500mbit"]) == 0
    shown = capsys.readouterr().out
    assert "between 2 hosts" in shown
    for row in ("torch's own", "none", "bf16", "int8", "lm4"):
        assert f"\n{row} " in shown
    assert shown.count("chosen") == 1
