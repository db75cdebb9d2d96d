"""The self-tests of `zcomm doctor`: test vectors on every kernel set, and two real ranks.

The ranks run once. Two checks judge what they found: whether training works, and whether they share
memory.
"""

import hashlib
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zcomm
from zcomm.conformance import vectors
from zcomm.kernels import KERNELS_VARIABLE, ON_GPUS, forced
from zcomm.launch.interfaces import LOOPBACK, gloo_choice, list_interfaces
from zcomm.launch.ranks import first_error, try_on_ranks
from zcomm.report.finding import NOTE, OK, PROBLEM, Finding
from zcomm.transport.shared_memory.ring import Ring
from zcomm.transport.shared_memory.segment import NoSharedMemory

STEPS = 3
NUMEL = 1 << 16
# |got - exact mean| / |exact mean| of Gaussian values after an all_reduce on 2 ranks. Typical
# values are 0, 0.009 and 0.13; with `none` both sides add the same two numbers.
ERROR_LIMITS = {"none": 0.0, "int8": 0.03, "lm4": 0.2}
_WORTHLESS = 1e9
# Starting ranks on a busy machine with a cold disk takes long.
TIMEOUT_S = 120.0


def check_vectors() -> Finding:
    """On every kernel set; "cpu" is another name of one of them."""
    here = [name for name, missing in zcomm.available_kernels().items() if not missing]
    remedy = (
        "Do not train with this build: its bytes are wrong. Reinstall zcomm. If that does not "
        "help, report this output and the processor."
    )
    return vectors.check({name: _device_of(name) for name in here if name != "cpu"}, remedy)


def _device_of(kernels: str) -> torch.device:
    types = ON_GPUS.get(kernels, ("cpu",))
    return torch.device(types[0] if len(types) == 1 or torch.cuda.is_available() else types[-1])


def check_ranks() -> Finding:
    """Over the interface that gloo would use and, if that fails, over loopback."""
    interface = _interface()
    failed, results = _run(interface)
    details: dict[str, Any] = {"interface": interface, "error": failed, "ranks": results}
    if not failed:
        return judged(results, interface, details)
    what = f"2 ranks over {interface} failed: {first_error(failed)}"
    lines = [what, "For the full error: --json"]
    remedy = "Read the full error: zcomm doctor --json."
    if interface != LOOPBACK:
        works = not _run(LOOPBACK)[0]
        details["works_over_loopback"] = works
        lines.append(f"Over {LOOPBACK} they {'work' if works else 'fail too'}.")
        if works:
            remedy = (
                f"Let ranks on this machine connect over {interface} (is there a firewall?), or "
                "set GLOO_SOCKET_IFNAME to another interface."
            )
    return Finding(PROBLEM, lines, remedy, details)


def check_shared_memory() -> Finding:
    """What the ranks of check_ranks() found. Without shared memory training works, over gloo."""
    failed, results = _run(_interface())
    if failed:
        return Finding(NOTE, ["not tried, because the two ranks failed"])
    return judged_memory([found["shared_memory"] for found in results])


def _interface() -> str:
    return gloo_choice(list_interfaces()).interface or LOOPBACK


@cache
def _run(interface: str) -> tuple[str, list[Any]]:
    """The full error, or "", and what each rank found."""
    env = {"GLOO_SOCKET_IFNAME": interface}
    if forced() in ON_GPUS:
        env[KERNELS_VARIABLE] = ""  # the ranks use CPU tensors
    return try_on_ranks(2, try_zcomm, env=env, timeout_s=TIMEOUT_S)


def try_zcomm(rank: int, world_size: int) -> dict[str, Any]:
    """Runs on each rank: trains a small DDP model with lm4, then tries each codec."""
    torch.manual_seed(rank)  # DDP makes the replicas equal; the data stays different
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    handle = zcomm.compress(ddp, codec="lm4")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(STEPS):
        x = torch.randn(32, 64)
        loss = nn.functional.cross_entropy(ddp(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    memory = _shared_memory(handle)
    handle.close()
    replica = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    return {
        "replica": _sha256(replica),
        "finite": bool(replica.isfinite().all()),
        "errors": {spec: _all_reduce_error(spec, world_size) for spec in ERROR_LIMITS},
        "shared_memory": memory,
    }


def _shared_memory(handle: zcomm.Handle) -> dict[str, Any]:
    """Why this rank has none (or ""), what went through it, and whether it sees a peer's death."""
    (engine,) = handle._compressor.engines()
    ring = engine.transport.ring
    return {
        "reason": ring.reason if isinstance(ring, NoSharedMemory) else "",
        "bytes": handle.stats().shared_bytes,
        "has_pidfds": isinstance(ring, Ring) and ring.has_pidfds,
    }


def _all_reduce_error(spec: str, world_size: int) -> float:
    got = torch.randn(NUMEL)
    exact = got.clone()
    zcomm.all_reduce(got, codec=spec)
    dist.all_reduce(exact)
    exact /= world_size
    return _finite(float((got - exact).norm() / exact.norm()))


def _finite(error: float) -> float:
    """JSON has no NaN: a number worse than any limit stands for it."""
    return error if error < _WORTHLESS else _WORTHLESS


def _sha256(t: Tensor) -> str:
    return hashlib.sha256(bytes(t.contiguous().view(torch.uint8).tolist())).hexdigest()


def judged_memory(found: list[dict[str, Any]]) -> Finding:
    first = found[0]
    if first["reason"]:
        lines = [f"ranks of one host use gloo: {first['reason']}", "they work, and are slower"]
        return Finding(NOTE, lines, "", first)
    lines = ["the ranks of this host share memory"]
    if all(one["has_pidfds"] for one in found):
        return Finding(OK, lines, "", first)
    lines.append("no pidfd here: a rank that dies is noticed when its connection closes")
    return Finding(NOTE, lines, "", first)


def judged(results: list[Any], interface: str, details: dict[str, Any]) -> Finding:
    lines, when = [], f"after {STEPS} steps of DDP with lm4"
    if len({found["replica"] for found in results}) > 1:
        lines.append(f"expected identical replicas {when}, got different ones")
    if not all(found["finite"] for found in results):
        lines.append(f"expected finite parameters {when}, got NaN or Inf")
    worst = {spec: max(found["errors"][spec] for found in results) for spec in ERROR_LIMITS}
    for spec, limit in ERROR_LIMITS.items():
        if worst[spec] > limit:
            got = f"expected an error of at most {limit:g}, got {worst[spec]:.3g}"
            lines.append(f"all_reduce with {spec}: {got}")
    if lines:
        remedy = "Do not train with this build: its results are wrong. Reinstall torch and zcomm."
        return Finding(PROBLEM, lines, remedy, details)
    errors = ", ".join(f"{spec} {error:.2g}" for spec, error in worst.items())
    trained = f"ranks meet over {interface}; DDP with lm4: identical replicas after {STEPS} steps"
    return Finding(OK, [trained, f"all_reduce error against gloo's: {errors}"], "", details)
