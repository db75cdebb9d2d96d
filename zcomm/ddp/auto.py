"""codec="auto" for one DDP model: a choice at registration, and perhaps another in training."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zcomm.engine.engine import Engine
from zcomm.engine.tuning.check import SelfCheck, Step, decided_again
from zcomm.engine.tuning.choice import Choice, Gradients, decide
from zcomm.engine.tuning.measure import CANDIDATES, Ranks
from zcomm.sharding.settings import Settings
from zcomm.transport.handshake import Caller

NO_GRADIENTS = Gradients("all_reduce", [])  # of one rank
# Every rank's numbers, in rank order.
Exchange = Callable[[Tensor], Tensor]


class AutoCodec:
    """The choice, and the clock of the first steps. It decides again only if it has measured, and
    if residuals do not belong to the codec that made them."""

    def __init__(
        self,
        engine: Engine | None,
        ranks: Ranks,
        caller: Caller,
        settings: Settings,
        device: torch.device,
        gradients: Gradients,
    ) -> None:
        two_hops = settings.two_hops(ranks.grouped)
        self.choice, self._model = decide(
            engine, ranks, [caller], settings.threads, two_hops, device, gradients
        )
        self._check = SelfCheck() if self._model and not settings.feedback else None

    def begin_step(self, step: int, exposed_s: float) -> None:
        if self._check is not None:
            self._check.begin_step(step, exposed_s)

    def take_bucket(self, numel: int) -> None:
        if self._check is not None:
            self._check.take_bucket(numel)

    @property
    def is_due(self) -> bool:
        return self._check is not None and self._check.is_due

    def settle(self) -> None:
        """Keeps the choice for good: it is that of a checkpoint."""
        self._check = None

    def decide_again(self, exchange: Exchange, step: int) -> Choice | None:
        """The choice of rank 0, from all ranks' numbers; None if they could not be exchanged."""
        assert self._check is not None
        assert self._model is not None
        check, self._check = self._check, None
        self._model.gradients = self._model.gradients._replace(bucket_numels=check.bucket_numels)
        mine = torch.tensor(check.typical(), dtype=torch.float64, device="cpu")
        typical = Step(*exchange(mine).view(-1, len(mine)).amax(0).tolist())
        if typical.s <= 0:  # the engine has failed
            return None
        choice = decided_again(self.choice, self._model, typical, step)
        index = torch.tensor([CANDIDATES.index(choice.codec)], dtype=torch.float64, device="cpu")
        return choice.with_codec(CANDIDATES[int(exchange(index)[0])])


def expected_gradients(ddp: Any, named: Mapping[str, Tensor], kind: str) -> Gradients:
    """What DDP will give each bucket, once it has seen a step."""
    numel = sum(p.numel() for p in named.values())
    nbytes = sum(p.nbytes for p in named.values())
    count = max(math.ceil(nbytes / ddp.bucket_bytes_cap), 1)
    itemsize = round(nbytes / numel) if numel else 4
    return Gradients(kind, [math.ceil(numel / count)] * count, itemsize)
