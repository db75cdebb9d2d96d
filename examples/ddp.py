"""Trains one model twice, with plain DDP and with zcomm: the same loss from an eighth of the bytes.

Run: torchrun --nproc-per-node 2 examples/ddp.py

It runs on the CPU. On GPUs, pass "nccl" to init_process_group and move the model and the batches to
each rank's device. That path is built but has not run on a GPU yet: see docs/gpu.md.
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


def train(ddp: DistributedDataParallel) -> None:
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    for step in range(STEPS):
        x, labels = make_batch(seed=1000 * (1 + dist.get_rank()) + step)
        loss = nn.functional.cross_entropy(ddp(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def held_out_loss(ddp: DistributedDataParallel) -> float:
    x, labels = make_batch(seed=1, size=2000)
    return nn.functional.cross_entropy(ddp.module(x), labels).item()


def replicas_are_identical(ddp: DistributedDataParallel) -> bool:
    mine = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return all(torch.equal(one, mine) for one in everyones)


def main() -> None:
    dist.init_process_group("gloo")
    plain, compressed = make_model(), make_model()
    handle = zcomm.compress(compressed, codec="lm4")  # the only line that zcomm needs
    before = held_out_loss(plain)
    train(plain)
    train(compressed)

    stats, identical = handle.stats(), replicas_are_identical(compressed)
    raw_mb, sent_mb = (n / stats.steps / 1e6 for n in (stats.raw_bytes, stats.wire_bytes))
    if dist.get_rank() == 0:
        print(f"held-out loss before training: {before:.3f}")
        print(f"plain DDP:  loss {held_out_loss(plain):.3f}, {raw_mb:.3f} MB sent per step")
        print(f"with lm4:   loss {held_out_loss(compressed):.3f}, {sent_mb:.3f} MB sent per step")
        print(f"{stats.ratio:.1f} times fewer bytes; replicas identical: {identical}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
