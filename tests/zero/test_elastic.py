"""Elastic training: a rank is killed, torchrun restarts all, and the result does not change."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ddp_training import assert_bit_equal

STEPS = 12
SCRIPT = Path(__file__).parents[1] / "support" / "elastic_training.py"
# Without it, a restarted rank finds addresses of dead ranks in torchrun's store, and
# init_process_group("gloo") fails or hangs (torch 2.13).
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
WARNING = "zcomm: torchrun may restart ranks, but keeps their old addresses in its store"


def torchrun(
    folder: Path, restarts: int, env: dict[str, str], steps: int, *kill: int
) -> tuple[list[Any], str]:
    """What each of the two ranks left in the folder when it finished, and what they printed."""
    folder.mkdir()
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node", "2", "--max-restarts", str(restarts)]
    done = subprocess.run(
        [*launcher, *options, str(SCRIPT), str(folder), str(steps), *map(str, kill)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"result-{rank}") for rank in range(2)], done.stderr


def test_a_killed_rank_changes_no_bit_of_the_result(tmp_path: Path) -> None:
    victim, at_step = random.randrange(2), random.randrange(1, STEPS)
    print(f"rank {victim} dies at step {at_step}")
    whole, printed = torchrun(tmp_path / "whole", 2, FRESH_STORE, STEPS)
    assert WARNING not in printed
    restarted, _ = torchrun(tmp_path / "restarted", 2, FRESH_STORE, STEPS, victim, at_step)
    assert (tmp_path / "restarted" / "killed").exists()
    for (_, expected), (first, got) in zip(whole, restarted):
        assert first == at_step // 3 * 3
        assert_bit_equal(got, expected)


def test_restarts_over_the_agents_store_draw_one_warning(tmp_path: Path) -> None:
    _, printed = torchrun(tmp_path / "run", 1, {}, 1)
    assert printed.count(WARNING) == 1  # two models, two ranks
    assert "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in printed
