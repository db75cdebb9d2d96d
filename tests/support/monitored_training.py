"""Small models in training, for monitors to watch."""

from __future__ import annotations

from typing import Any

from torch import optim
from torch.nn.parallel import DistributedDataParallel

import zcomm
from ddp_training import Net, batch, seeded
from zcomm.codecs import SPECS

CODECS = (*SPECS[:-1], "topk:0.02")
WEIGHTS = ("first.weight", "middle.weight", "last.weight")  # of a Net


class Run:
    """A small model in training, by zcomm.compress and SGD or by ZeroOptimizer."""

    def __init__(
        self,
        model: Any = Net,
        zero: bool = False,
        codec: Any = "lm4",
        ddp: Any = None,
        **given: Any,
    ) -> None:
        self.ddp = DistributedDataParallel(seeded(model), **(ddp or {"bucket_cap_mb": 0.1}))
        self.owner: Any
        if zero:
            self.owner = zcomm.ZeroOptimizer(self.ddp, optim.AdamW, None, codec, **given)
            self.handle, self.optimizer = self.owner.handle, self.owner
        else:
            self.owner = self.handle = zcomm.compress(self.ddp, codec, **given)
            self.optimizer = optim.SGD(self.ddp.parameters(), lr=0.5)

    def step(self, rank: int, number: int) -> None:
        self.optimizer.zero_grad()
        self.backward(rank, number)
        self.optimizer.step()

    def backward(self, rank: int, number: int) -> None:
        self.ddp(batch(rank, number)).float().square().mean().backward()

    def steps(self, rank: int, count: int) -> None:
        for number in range(count):
            self.step(rank, number)

    def bits(self) -> dict[str, Any]:
        parameters = {name: p.detach().clone() for name, p in self.ddp.named_parameters()}
        return {"parameters": parameters, "residuals": self.handle.state_dict()["residuals"]}
