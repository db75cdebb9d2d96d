"""Two hops: ranks of one host sum their gradients first, so half as many bytes cross between hosts.

Run: torchrun --nproc-per-node 4 examples/hierarchy.py

This machine plays two hosts with two ranks each. In a real job, leave out hosts=2: ranks find out
which of them share a host. There codec="lm4" alone makes two hops, exact inside the hosts.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zcomm

STEPS = 40
TWO_HOPS = zcomm.Hierarchy(local="int8", across="lm4", hosts=2)  # ranks on each host
ONE_HOP = zcomm.Hierarchy(across="lm4", hosts=1)


def make_batch(seed: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """Noisy points around ten centers, and the center that each belongs to."""
    centers = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (size,), generator=random)
    return centers[labels] + 2 * torch.randn(size, 64, generator=random), labels


def train(codec: zcomm.Hierarchy) -> tuple[DistributedDataParallel, zcomm.Stats]:
    torch.manual_seed(0)
    layers = nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    ddp = DistributedDataParallel(nn.Sequential(*layers))
    handle = zcomm.compress(ddp, codec=codec)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    for step in range(STEPS):
        x, labels = make_batch(seed=1000 * (1 + dist.get_rank()) + step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), labels).backward()
        optimizer.step()
    return ddp, handle.stats()


@torch.no_grad()
def held_out_loss(ddp: DistributedDataParallel) -> float:
    x, labels = make_batch(seed=1, size=2000)
    return nn.functional.cross_entropy(ddp.module(x), labels).item()


def main() -> None:
    dist.init_process_group("gloo")
    (flat, flat_stats), (two, two_stats) = train(ONE_HOP), train(TWO_HOPS)
    sent = [stats.wire_bytes / stats.steps / 1e6 for stats in (flat_stats, two_stats)]

    # What crosses between hosts, by arithmetic: every rank owns a quarter of the gradient. Out and
    # back, a rank sends one encoded quarter to each rank it talks to on the other host.
    quarter = zcomm.codec("lm4").wire_nbytes(sum(p.numel() for p in two.parameters()) // 4) / 1e6
    flat_crossing = 2 * 2 * quarter  # to both ranks over there
    two_crossing = 2 * 1 * quarter  # to one of them: the sum of this host's ranks

    mine = torch.cat([p.detach().flatten() for p in two.parameters()])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    identical = all(torch.equal(one, mine) for one in everyones)
    if dist.get_rank() == 0:
        for name, ddp, mb, crossing in (
            ("one hop, lm4:        ", flat, sent[0], flat_crossing),
            ("two hops, int8 / lm4:", two, sent[1], two_crossing),
        ):
            print(f"{name} loss {held_out_loss(ddp):.3f}, {mb:.3f} MB sent per rank and step;")
            print(f"{'':21} about {crossing:.3f} MB of that crosses between hosts")
        print(f"replicas identical: {identical}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
