"""Watches a run: bytes and times of every step, and what compression costs each layer.

Run: torchrun --nproc-per-node 2 examples/monitor.py
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


def print_layers(sample: zcomm.monitor.Sample) -> None:
    """The compression error is relative: 10% means that a tenth of the gradient's norm is lost."""
    print(f"{'layer':10} {'gradient norm':>13} {'error':>7}")
    for name, layer in sample.layers.items():
        print(f"{name:10} {layer.grad_norm:13.4f} {layer.compression_error:7.1%}")


def main() -> None:
    dist.init_process_group("gloo")
    ddp = make_model()
    # One codec per layer: the first pattern that matches a parameter's name counts. Biases have
    # fewer than 1024 elements and travel uncompressed.
    handle = zcomm.compress(ddp, codec={"4.*": "int8", "*": "lm4"})

    # A monitor watches one rank. It sends nothing and changes no bit of the result.
    zcomm.monitor.Log(handle, every=20)  # prints on rank 0
    samples: list[zcomm.monitor.Sample] = []
    zcomm.monitor.Callback(handle, samples.append, every=20, layers_every=STEPS)
    # With tensorboard installed, and a SummaryWriter on rank 0 or None elsewhere:
    # zcomm.monitor.TensorBoard(handle, writer)
    train(ddp)

    last = samples[-1]
    if dist.get_rank() == 0:
        print_layers(last)
        memory = last.memory
        print(f"parameters {memory.parameters / 1e6:.2f} MB, buffers {memory.buffers / 1e6:.2f} MB")
        print(f"{last.ratio:.1f} times fewer bytes in the last {last.steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
