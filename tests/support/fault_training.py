"""A rank of tests/transport/test_faults.py: a script that trains until something goes wrong.

It says on its standard output, as lines of JSON, what it does and when it failed.

Usage: python fault_training.py TIMEOUT_S STEPS MEET
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import zcomm
from failing_training import backward, model
from zcomm.launch.rank_process import end_with_parent


def main(timeout_s: float, steps: int, meet: bool) -> None:
    end_with_parent(os.getppid())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ddp = model()
    say(step=0)
    # The fault comes before the ranks meet; then they may try again.
    tries = int(sys.stdin.readline()) if meet else 1
    while tries:
        tries -= 1
        try:
            train(ddp, timeout_s, steps)
            say(digest=digest(ddp))
            return
        except Exception as error:
            say(failed_at=time.monotonic(), error=type(error).__name__, text=str(error))
            if not tries:
                raise
            sys.stdin.readline()


def train(ddp: Any, timeout_s: float, steps: int) -> None:
    zcomm.compress(ddp, "lm4", timeout_s=timeout_s)
    for step in range(1, steps + 1):
        backward(ddp)
        with torch.no_grad():
            for p in ddp.parameters():
                p -= 1e-4 * p.grad
        say(step=step)
        time.sleep(0.02)


def digest(ddp: Any) -> str:
    flat = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True")
