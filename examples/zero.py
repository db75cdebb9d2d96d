"""Shards AdamW over the ranks with ZeroOptimizer: on two ranks, each keeps half of its state.

Run: torchrun --nproc-per-node 2 examples/zero.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zcomm

STEPS = 60


def make_batch(seed: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """Noisy points around ten centers, and the center that each belongs to."""
    centers = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (size,), generator=random)
    return centers[labels] + 2 * torch.randn(size, 64, generator=random), labels


def make_model() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    return DistributedDataParallel(nn.Sequential(*layers))


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> float:
    """Returns the loss on data that no rank has trained on."""
    for step in range(STEPS):
        x, labels = make_batch(seed=1000 * (1 + dist.get_rank()) + step)
        loss = nn.functional.cross_entropy(ddp(x), labels)
        optimizer.zero_grad()
        loss.backward()
        # No rank has the whole gradient, so the optimizer clips it.
        if isinstance(optimizer, zcomm.ZeroOptimizer):
            optimizer.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
    if isinstance(optimizer, zcomm.ZeroOptimizer):
        optimizer.sync_parameters()  # exact parameters, for evaluation and export
    x, labels = make_batch(seed=1, size=2000)
    with torch.no_grad():
        return nn.functional.cross_entropy(ddp.module(x), labels).item()


def main() -> None:
    dist.init_process_group("gloo")
    ddp = make_model()
    adamw = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    plain_loss = train(ddp, adamw)
    whole = sum(t.nbytes for state in adamw.state.values() for t in state.values())

    # `codec` is for gradients. With `param_codec`, updated parameters are sent as compressed
    # differences, and each owner keeps an exact master copy of its shard.
    ddp = make_model()
    zero = zcomm.ZeroOptimizer(ddp, torch.optim.AdamW, lr=1e-3, codec="lm4", param_codec="lm4")
    samples: list[zcomm.monitor.Sample] = []
    zcomm.monitor.Callback(zero, samples.append, every=STEPS)
    zero_loss = train(ddp, zero)

    memory, stats = samples[-1].memory, zero.handle.stats()
    sharded, masters = memory.optimizer or 0, memory.masters or 0
    if dist.get_rank() == 0:
        print(f"AdamW:          loss {plain_loss:.3f}, {whole / 1e6:.2f} MB of state per rank")
        print(f"ZeroOptimizer:  loss {zero_loss:.3f}, {sharded / 1e6:.2f} MB of state per rank")
        print(f"                and {masters / 1e6:.2f} MB of exact parameters (param_codec)")
        print(f"{stats.ratio:.1f} times fewer bytes, gradients and parameters together")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
