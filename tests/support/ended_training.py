"""A process that has finished, while gloo's threads have not; see test_exit.py.

Usage: ended_training.py STORE plain|zcomm
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if sys.argv[2] == "zcomm":
    import zcomm  # noqa: F401

store = dist.FileStore(sys.argv[1], 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
ddp = DistributedDataParallel(nn.Linear(8, 8))
dist.all_reduce(torch.ones(1000))
time.sleep(0.2)  # now gloo's thread wants the GIL
dist.destroy_process_group()
