"""zcomm works without NumPy, and says so where torch needs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
sys.modules["numpy"] = None  # as if it were not installed; before torch looks for it
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import zcomm

dist.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(100, 100))
opt = zcomm.ZeroOptimizer(ddp, torch.optim.AdamW, codec="lm4", param_codec="lm4")
ddp(torch.randn(4, 100)).sum().backward()
opt.clip_grad_norm_(1.0)
opt.step()
opt.load_state_dict(opt.consolidated_state_dict())
try:
    zcomm.save_checkpoint("folder", {"optimizer": opt}, 1)
except RuntimeError as error:
    assert "pip install numpy" in str(error), error
else:
    raise AssertionError("expected an error")
dist.destroy_process_group()
"""


def test_training_works_without_numpy(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "torch.distributed.run", *options, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
