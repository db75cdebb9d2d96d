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
from zcomm.sharding.settings import AUTO, Settings
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
        decides = self._model is not None and not settings.feedback
        self._check = SelfCheck(settings.start_step) if decides else None

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
        everyone = exchange(mine).view(-1, len(mine))
        # A rank that is early also waits for the others: that is not communication.
        s, exposed_s, window_s = everyone.amax(0)[0], everyone.amin(0)[1], everyone.amax(0)[2]
        typical = Step(float(s), float(exposed_s), float(window_s))
        if typical.s <= 0:  # the engine has failed
            return None
        choice = decided_again(self.choice, self._model, typical, step)
        index = torch.tensor([CANDIDATES.index(choice.codec)], dtype=torch.float64, device="cpu")
        return choice.with_codec(CANDIDATES[int(exchange(index)[0])])


def deterministic(settings: Settings) -> str:
    """What ranks compare: with "auto", all of them must be allowed to measure, or none."""
    return str(settings.is_auto and torch.are_deterministic_algorithms_enabled())


def expected_gradients(
    ddp: Any, named: Mapping[str, Tensor], settings: Settings, kind: str
) -> Gradients:
    """What DDP will give each bucket, once it has seen a step, of what "auto" chooses for."""
    chosen_for = [
        p
        for name, p in named.items()
        if p.dtype is not torch.float64 and settings.spec_of(name, p.numel()) == AUTO
    ]
    numel, nbytes = sum(p.numel() for p in chosen_for), sum(p.nbytes for p in chosen_for)
    if not numel:
        return Gradients(kind, [])
    count = min(math.ceil(nbytes / max(ddp.bucket_bytes_cap, 1)), len(chosen_for))
    return Gradients(kind, [math.ceil(numel / count)] * count, round(nbytes / numel))
