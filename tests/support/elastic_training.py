"""A training that survives the death of a rank, for torchrun --max-restarts; see test_elastic.py.

Usage: elastic_training.py FOLDER STEPS [VICTIM AT_STEP]: the victim kills itself once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import zcomm
from zero_checkpoints import BOTH_WAYS, Training

SAVE_EVERY = 3


def train(folder: Path, steps: int, victim: int, at_step: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training = Training(BOTH_WAYS)
    first = zcomm.load_checkpoint(folder / "checkpoints", training.parts()) or 0
    for step in range(first, steps):
        if (rank, step) == (victim, at_step) and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        training.run(rank, range(step, step + 1))
        if (step + 1) % SAVE_EVERY == 0:
            zcomm.save_checkpoint(folder / "checkpoints", training.parts(), step + 1)
    torch.save((first, training.parameters()), folder / f"result-{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, steps, *kill = sys.argv[1:]
    victim, at_step = map(int, kill) if kill else (-1, -1)
    train(Path(folder), int(steps), victim, at_step)
