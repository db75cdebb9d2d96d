"""Small models under DDP, and the books of their gradients."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zcomm
from everyones import everyones

# What fp32 rounding alone leaves open in the books; lm4 leaves out 2**-4 and more of a step.
ROUNDING = 2.0**-20
# Residuals, and several chunks in a bucket.
LM4: dict[str, Any] = {"codec": "lm4", "feedback": True, "chunk_mb": 1 / 16}
# Options of DDP and settings that no result bit may depend on.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one bucket": ({"bucket_cap_mb": 100}, {}),
    "many buckets": ({"bucket_cap_mb": 0.05}, {}),
    "small chunks": ({"bucket_cap_mb": 100}, {"chunk_mb": 1 / 16}),
    "threads": ({"bucket_cap_mb": 0.3}, {"threads": 3}),
    "no rebuild": ({"bucket_cap_mb": 0.3, "find_unused_parameters": True}, {}),
    "static graph": ({"bucket_cap_mb": 0.3, "static_graph": True}, {}),
    "bucket views": ({"gradient_as_bucket_view": True}, {"verify": False}),
}


class Net(nn.Module):
    """Three weights to compress, one of them of several pieces, and three small biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 280)
        self.middle = nn.Linear(280, 260)
        self.last = nn.Linear(260, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


class Branches(Net):
    """A Net with a second middle; `branch` says which one is used: "middle", "other" or both."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(280, 260)
        self.branch = "both"

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        used = [self.middle, self.other] if self.branch == "both" else [getattr(self, self.branch)]
        return self.last(sum(m(x) for m in used).tanh())


class Checkpointed(Net):
    """Computes its layers once more in backward; reentrant: in a backward inside of backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = checkpoint(self.middle, x, use_reentrant=self.reentrant).tanh()
        return checkpoint(self.last, x, use_reentrant=self.reentrant)


class OddShapes(nn.Module):
    """A scalar, an empty, a tiny and a transposed parameter, and one of a block and a bit."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 32))
        self.tiny = nn.Parameter(torch.randn(3))
        self.turned = nn.Parameter(torch.randn(70, 32).t())
        self.longer = nn.Parameter(torch.randn(131))

    def forward(self, x: Tensor) -> Tensor:
        x = (x @ self.turned).tanh() * self.scalar
        rest = self.longer.tanh().mean() + self.tiny.tanh().mean() + self.empty.sum()
        return x * rest


class Mixed(nn.Module):
    """An fp32, a bf16 and an fp64 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(32, 280)
        self.brief = nn.Linear(280, 260, dtype=torch.bfloat16)
        self.exact = nn.Linear(260, 10, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.exact(self.brief(self.single(x).bfloat16()).double().tanh())


class Spoiled:
    """Replaces one element of a gradient in the backward() that is next."""

    def __init__(self, p: nn.Parameter, element: int) -> None:
        self.element = element
        self.value: float | None = None
        p.register_hook(self.spoil)

    def spoil(self, gradient: Tensor) -> Tensor | None:
        if self.value is None:
            return None
        gradient = gradient.clone()
        gradient.view(-1)[self.element], self.value = self.value, None
        return gradient


Hooked = zcomm.Handle | zcomm.HookState  # a state has a handle after its first bucket


class Outcome(NamedTuple):
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    gap: float


class Books:
    """What every parameter's gradients were on this rank, and what arrived in `p.grad` instead.

    With feedback nothing is lost: the sum of all that arrived, and the residuals of all ranks, are
    the sum of the ranks' mean gradients.
    """

    def __init__(self, ddp: DistributedDataParallel, hooked: Hooked) -> None:
        self.hooked, self.group = hooked, ddp.process_group
        self.named = {n: p for n, p in ddp.module.named_parameters() if p.requires_grad}
        self.given, self.got, self.new = (
            {n: torch.zeros(p.numel(), dtype=torch.float64) for n, p in self.named.items()}
            for _ in range(3)
        )
        self.size = dict.fromkeys(self.named, 0.0)
        for name, p in self.named.items():
            p.register_hook(partial(self._take, name))

    def _take(self, name: str, gradient: Tensor) -> None:
        self.new[name] += in_memory_order(gradient, self.named[name])

    def close_step(self, scale: float = 1.0, counts: bool = True) -> None:
        """After backward(); a step that does not count was skipped by the optimizer."""
        for name, p in self.named.items():
            if counts:
                self.given[name] += self.new[name] / scale
                self.size[name] += largest(self.new[name]) / scale
                if p.grad is not None:
                    self.got[name] += in_memory_order(p.grad, p) / scale
            self.new[name].zero_()

    def gap(self) -> float:
        """The largest difference in the books, relative to the gradients: a collective call."""
        hooked = self.hooked
        handle = hooked.handle if isinstance(hooked, zcomm.HookState) else hooked
        state = handle.state_dict()
        mine = (self.given, self.size, residuals(handle), state["scale"])
        ranks = everyones(mine, self.group)
        worst = 0.0
        for name, got in self.got.items():
            mean = sum(given[name] for given, *_ in ranks) / len(ranks)
            size = sum(sizes[name] for _, sizes, *_ in ranks) / len(ranks)
            error = largest(got + held_back(ranks, name) - mean)
            worst = max(worst, error / size if size else error)
        return worst


def residuals(handle: zcomm.Handle) -> dict[str, dict[str, Tensor]]:
    """This rank's, at their places in the parameter where it does not hold all of it."""
    feedback = handle._compressor.feedback
    return {
        "sent": {n: held.spread(feedback.side) for n, held in feedback.held("sent").items()},
        "owned": {n: held.read(feedback.side) for n, held in feedback.held("owned").items()},
    }


def in_memory_order(t: Tensor, parameter: Tensor) -> Tensor:
    """All elements in the order of the parameter's memory, which is that of residuals, as fp64."""
    order = sorted(range(t.dim()), key=lambda d: -parameter.stride(d))
    return t.detach().permute(order).reshape(-1).double()


def largest(t: Tensor) -> float:
    return t.abs().max().item() if t.numel() else 0.0


def held_back(ranks: list[Any], name: str) -> Tensor | float:
    """Residuals of all ranks, in units of the mean gradient: those of `owned` are runs in order."""
    if name not in ranks[0][2]["sent"]:
        return 0.0
    sent = sum(residuals["sent"][name].double() for _, _, residuals, _ in ranks)
    owned = torch.cat([residuals["owned"][name].double() for _, _, residuals, _ in ranks])
    return (sent + owned) / ranks[0][3]


def seeded(fn: Any, seed: int = 0) -> Any:
    """What fn() makes with this seed: the same on all ranks and in all runs."""
    torch.manual_seed(seed)
    return fn()


def batch(rank: int, step: int, *shape: int) -> Tensor:
    return torch.randn(shape or (8, 32), generator=torch.Generator().manual_seed(100 * rank + step))


def train(
    model: Any,
    rank: int,
    hooked: Hooked | None = None,
    *,
    steps: int = 4,
    accumulate: int = 1,
    shape: tuple[int, ...] = (8, 32),
    set_to_none: bool = True,
) -> Outcome:
    """Trains a DDP model on batches of this rank's own, with books if its `hooked` is given."""
    ddp = getattr(model, "_orig_mod", model)
    books = Books(ddp, hooked) if hooked else None
    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.5)
    for step in range(steps):
        optimizer.zero_grad(set_to_none)
        for part in range(accumulate):
            with ddp.no_sync() if part < accumulate - 1 else nullcontext():
                x = batch(rank, step * accumulate + part, *shape)
                model(x).float().square().mean().backward()
        if books:
            books.close_step()
        optimizer.step()
    return outcome(ddp, books)


def outcome(ddp: DistributedDataParallel, books: Books | None = None) -> Outcome:
    named = dict(ddp.module.named_parameters())
    return Outcome(
        {name: p.detach().clone() for name, p in named.items()},
        {name: None if p.grad is None else p.grad.clone() for name, p in named.items()},
        books.gap() if books else 0.0,
    )


def assert_equal_replicas(outcomes: list[Outcome]) -> None:
    for other in outcomes[1:]:
        assert_bit_equal(other.parameters, outcomes[0].parameters)
        assert_bit_equal(other.gradients, outcomes[0].gradients)


def assert_bit_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two dicts of tensors, or of dicts of them."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_bit_equal(got[name], value)
        elif isinstance(value, Tensor):
            assert got[name] is not None, f"{name}: expected a tensor, got None"
            assert got[name].dtype is value.dtype, name
            assert torch.equal(got[name], value), name
        else:
            assert got[name] == value, name
