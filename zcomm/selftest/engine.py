"""Training on the device: DDP's hook and ZeRO must reach the parameters that we can predict.

The model's gradients are sums of products of small integers: exact in any order and on any device,
and independent of its parameters. So the results of DDP, the hook and ZeRO are known; for a codec,
from the reference kernels on the CPU.

One rank sends nothing: the hook is the identity, so a job goes to an engine directly. Two ranks
need two GPUs.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zcomm
from zcomm import kernels
from zcomm.codecs import codec
from zcomm.conformance.contract import difference
from zcomm.engine.engine import make_engine
from zcomm.engine.job import REDUCE_SCATTER, Job, JobData
from zcomm.engine.streams import streams_of
from zcomm.kernels import KERNELS_VARIABLE
from zcomm.launch.ranks import first_error, try_on_ranks
from zcomm.report.finding import OK, PROBLEM, Finding, reason
from zcomm.selftest.tally import DO_NOT_TRAIN, Scope
from zcomm.sharding.chunks import Item, make_chunks
from zcomm.sharding.settings import Settings
from zcomm.transport.handshake import Caller

STEPS = 3
SPECS = ("none", "int8", "lm4")
# Powers of two make products exact, so that fused and separate roundings agree.
LR, MOMENTUM = 2.0**-6, 0.5
NUMEL = 1_700_001  # several of the engine's chunks
BATCH, FEATURES = 16, 384
TIMEOUT_S = 200.0


def check(scope: Scope) -> Finding:
    device, chosen = scope.subject.device, scope.subject.kernels
    several = device.type == "cpu" or torch.cuda.device_count() > 1
    env = {KERNELS_VARIABLE: chosen} if chosen in kernels.NAMES else {}
    faults: list[str] = []
    for world_size in (1, 2) if several else (1,):
        faults += _faults(world_size, str(device), env)
    tried = f"1 rank{' and 2 ranks' if several else ' (2 ranks need 2 GPUs)'}"
    details = {"two_ranks": several, "faults": faults}
    if faults:
        return Finding(PROBLEM, [reason(fault) for fault in faults[:6]], DO_NOT_TRAIN, details)
    line = (
        f"{tried}, {STEPS} steps: compress and ZeroOptimizer with {', '.join(SPECS)}, and an "
        "engine's reduce-scatter, match plain DDP and the reference bit for bit"
    )
    own = "" if env else f"with the default kernels, not {chosen}"
    return Finding(OK, [line, own] if own else [line], "", details)


def _faults(world_size: int, device: str, env: dict[str, str]) -> list[str]:
    error, found = try_on_ranks(world_size, try_training, device, env=env, timeout_s=TIMEOUT_S)
    if error:
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        return [f"{ranks} failed: {first_error(error)}\n{error}"]
    return [
        f"rank {rank} of {world_size}: {f}" for rank, faults in enumerate(found) for f in faults
    ]


def try_training(rank: int, world_size: int, device_name: str) -> list[str]:
    """Runs on each rank and returns what is wrong."""
    device, group = torch.device(device_name), None
    if device.type == "cuda":
        device = device if world_size == 1 else torch.device("cuda", rank)
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl")
    run = _Training(rank, world_size, device, group)
    faults = run.compared("plain DDP", run.plain(), "none", 0)
    for spec in SPECS:
        faults += run.compared(f"compress with {spec}", run.hooked(spec), spec, 2)
        faults += run.compared(f"ZeroOptimizer with {spec}", run.sharded(spec), spec, 1)
    if world_size == 1:
        faults += [text for spec in SPECS if (text := _alone(spec, device, group))]
    return faults


class Sums(nn.Module):
    """Its gradients are target^T @ x, independent of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(FEATURES, 200), nn.Linear(FEATURES, 40)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.wide(x), self.narrow(x)), 1)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 * rank + step)
    x, target = (
        torch.randint(-3, 4, (BATCH, width), generator=g).float() for width in (FEATURES, 240)
    )
    return x, target


def exact_gradients(rank: int, step: int) -> dict[str, Tensor]:
    x, target = batch(rank, step)
    weight, bias = target.T @ x, target.sum(0)
    return {
        "wide.weight": weight[:200],
        "wide.bias": bias[:200],
        "narrow.weight": weight[200:],
        "narrow.bias": bias[200:],
    }


class _Training:
    """The same training done several ways; each returns the parameters after the last step."""

    def __init__(self, rank: int, world_size: int, device: torch.device, group: Any) -> None:
        self.rank, self.world_size, self.device, self.group = rank, world_size, device, group

    def plain(self) -> dict[str, Tensor]:
        ddp = self._wrapped()
        return self._trained(ddp, self._sgd(ddp))

    def hooked(self, spec: str) -> dict[str, Tensor]:
        ddp = self._wrapped()
        handle = zcomm.compress(ddp, spec, timeout_s=TIMEOUT_S / 2)
        found = self._trained(ddp, self._sgd(ddp))
        handle.close()
        return found

    def sharded(self, spec: str) -> dict[str, Tensor]:
        ddp = self._wrapped()
        optimizer = zcomm.ZeroOptimizer(
            ddp, torch.optim.SGD, codec=spec, lr=LR, momentum=MOMENTUM, timeout_s=TIMEOUT_S / 2
        )
        found = self._trained(ddp, optimizer)
        optimizer.handle.close()
        return found

    def compared(self, way: str, got: dict[str, Tensor], spec: str, hops: int) -> list[str]:
        """What differs from SGD with the predicted gradients."""
        model = self._model()
        optimizer = self._sgd(model)
        for step in range(STEPS):
            for name, p in model.named_parameters():
                grads = [exact_gradients(r, step)[name] for r in range(self.world_size)]
                p.grad = _reduced(grads, spec, hops).to(self.device)
            optimizer.step()
        found = {name: difference(got[name], p) for name, p in _parameters(model).items()}
        return [f"{way}: {name}: {text}" for name, text in found.items() if text]

    def _model(self) -> Sums:
        torch.manual_seed(0)
        return Sums().to(self.device)

    def _wrapped(self) -> DistributedDataParallel:
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(self._model(), device_ids=ids, process_group=self.group)

    def _sgd(self, model: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def _trained(self, ddp: DistributedDataParallel, optimizer: Any) -> dict[str, Tensor]:
        for step in range(STEPS):
            x, target = (t.to(self.device) for t in batch(self.rank, step))
            optimizer.zero_grad()
            (ddp(x) * target).sum().backward()
            optimizer.step()
        return _parameters(ddp.module)


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


def _reduced(grads: list[Tensor], spec: str, hops: int) -> Tensor:
    """The mean over ranks: encoded by each rank and, with two hops, again by the owner."""
    ranks, shape, n = len(grads), grads[0].shape, grads[0].numel()
    if ranks == 1 or n < Settings(spec).min_numel:
        return torch.stack(grads).sum(0) / ranks
    c = codec(spec)
    wires = [c.encode(g.flatten(), prescale=1 / ranks, kernels="reference") for g in grads]
    mean = c.decode_sum(wires, n, kernels="reference")
    if hops == 2:
        mean = c.decode(c.encode(mean, kernels="reference"), n, kernels="reference")
    return mean.view(shape)


def _alone(spec: str, device: torch.device, group: Any) -> str:
    """A reduce-scatter on one rank, which decodes what it encoded."""
    c, source = codec(spec), torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    chunks = make_chunks([Item("", c, NUMEL, 0, (0, NUMEL))], 0, 1, Settings(spec).chunk_size(1))
    target = torch.zeros(NUMEL, device=device)
    caller = Caller("the self-test", group, TIMEOUT_S / 2)
    engine = make_engine(caller, f"selftest/{spec}", streams_of(device))
    job = Job("selftest", REDUCE_SCATTER, chunks, JobData(source.to(device), target))
    engine.run(job)
    engine.synchronize()
    engine.stop()
    if job.error is not None:
        return f"an engine with {spec}: {type(job.error).__name__}: {job.error}"
    expected = c.decode(c.encode(source, kernels="reference"), NUMEL, kernels="reference")
    found = difference(target.cpu(), expected)
    return f"an engine with {spec}: {found}" if found else ""
