"""FSDP2 with compressed gradients and parameters, next to exact ones.

Run: torchrun --nproc-per-node 2 examples/fsdp.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zcomm.fsdp

STEPS = 60


def make_batch(seed: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """Noisy points around ten centers, and the center that each belongs to."""
    centers = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (size,), generator=random)
    return centers[labels] + 2 * torch.randn(size, 64, generator=random), labels


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    model = nn.Sequential(*layers)
    for layer in (model[0], model[2]):
        fully_shard(layer, reshard_after_forward=True)  # stage 3; False is stage 2
    fully_shard(model)
    return model


def train(model: nn.Module) -> Tensor:
    """Returns what the model says about data that no rank has trained on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        x, labels = make_batch(seed=1000 * (1 + dist.get_rank()) + step)
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        return model(make_batch(seed=1, size=2000)[0])


def main() -> None:
    dist.init_process_group("gloo")
    exact, compressed = make_model(), make_model()
    # After the last fully_shard. `codec` is for gradients, `param_codec` for the parameters that
    # FSDP gathers. With codec="none" the result is plain FSDP2's.
    zcomm.fsdp.compress(exact, codec="none")
    handle = zcomm.fsdp.compress(compressed, codec="lm4", param_codec="int8")
    exact_logits, logits = train(exact), train(compressed)

    labels = make_batch(seed=1, size=2000)[1]
    exact_loss, loss = (nn.functional.cross_entropy(x, labels) for x in (exact_logits, logits))
    everyones = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, logits)
    identical = all(torch.equal(one, logits) for one in everyones)

    shards = [p.to_local() for p in compressed.parameters() if isinstance(p, DTensor)]
    held, whole = (sum(t.nbytes for t in ts) / 1e6 for ts in (shards, compressed.parameters()))
    stats = handle.stats()
    raw_mb, sent_mb = (n / stats.steps / 1e6 for n in (stats.raw_bytes, stats.wire_bytes))
    if dist.get_rank() == 0:
        print(f"exact:                  loss {exact_loss:.3f}, {raw_mb:.2f} MB sent per step")
        print(f"lm4, parameters int8:   loss {loss:.3f}, {sent_mb:.2f} MB sent per step")
        print(f"{stats.ratio:.1f} times fewer bytes; ranks agree to the bit: {identical}")
        print(f"rank 0 holds {held:.2f} of {whole:.2f} MB of parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
