"""Speed of the primitives, compared with a copy that moves as many bytes on the same device.

Each round times the copy, then the call, so that both see the same load. Figures are medians.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from zcomm.codecs import codec
from zcomm.codecs.layout import Layout, Residuals, Segment
from zcomm.conformance.contract import NAMES, Subject
from zcomm.kernels.device import new_faults
from zcomm.report.finding import OK, Finding
from zcomm.report.table import whole
from zcomm.selftest.tally import Scope

_NUMEL, _QUICK_NUMEL = 25_000_000, 1_000_000
_ROUNDS, _QUICK_ROUNDS = 7, 3
_WIRES = 4
# A launch takes the host microseconds; several calls in a row hide it.
_CUDA_CALLS = 10
_HEADINGS = ["codec", "encode ms", "GB/s", "copy", "sum ms", "GB/s", "copy"]


def check(scope: Scope) -> Finding:
    numel = _QUICK_NUMEL if scope.quick else _NUMEL
    rounds = _QUICK_ROUNDS if scope.quick else _ROUNDS
    copy = _Copy(16 * numel, scope.subject.device)
    rows: list[list[str]] = []
    details: dict[str, object] = {}
    for spec in [spec for spec in scope.specs if spec in NAMES] or scope.specs:
        calls = _calls(spec, numel, scope.subject)
        found = [_measured(run, nbytes, copy, rounds) for run, nbytes in calls]
        rows.append([spec, *(text for pair in found for text in _cells(*pair))])
        details[spec] = [{"ms": 1e3 * s, "GB/s": n / s / 1e9, "of copy": x} for n, s, x in found]
    threads = torch.get_num_threads()
    where = f"on {threads} threads" if scope.subject.device.type == "cpu" else "on the device"
    heading = (
        f"{numel:,} fp32 elements {where}, medians of {rounds} rounds: encode with fp32 residual, "
        f"and decode_sum of {_WIRES} wires; GB/s counts bytes that must be read and written; copy: "
        "relative to a copy"
    )
    table = whole(_HEADINGS, rows).splitlines()
    return Finding(OK, [heading, *table], "", {"numel": numel, "calls": details})


class _Copy:
    """A copy that reads and writes a given total of bytes."""

    def __init__(self, most_nbytes: int, device: torch.device) -> None:
        self.device = device
        halves = torch.ones(most_nbytes, dtype=torch.uint8, device=device).view(2, -1)
        self._source, self._target = halves.unbind(0)

    def seconds(self, nbytes: int) -> float:
        half = nbytes // 2
        copy = partial(self._target[:half].copy_, self._source[:half])
        return _seconds(copy, self.device)


def _calls(spec: str, n: int, subject: Subject) -> list[tuple[Callable[[], object], int]]:
    """Each call, and the bytes it must read and write.

    There are four wires: a single one, read four times, would come from the cache.
    """
    device, kernels = subject.device, subject.kernels
    layout = Layout([Segment(codec(spec), n)])
    grad = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(device)
    residual = torch.zeros(n, device=device)
    wires = [layout.encode(grad, kernels=kernels) for _ in range(_WIRES)]
    held, out, faults = Residuals(layout, [residual]), torch.zeros(n, device=device), None
    if device.type == "cuda":
        faults = new_faults(device)  # without it each call would wait for the device
    nbytes = layout.wire_nbytes
    encode = partial(layout.encode, grad, held, out=wires[0], kernels=kernels)
    total = partial(layout.decode_sum, wires, out=out, kernels=kernels, faults=faults)
    return [(encode, 12 * n + nbytes), (total, _WIRES * nbytes + 4 * n)]


def _measured(
    run: Callable[[], object], nbytes: int, copy: _Copy, rounds: int
) -> tuple[int, float, float]:
    """Bytes, seconds, and speed relative to the copy. The first round warms up."""
    pairs = [(copy.seconds(nbytes), _seconds(run, copy.device)) for _ in range(rounds + 1)][1:]
    share = statistics.median(one / other for one, other in pairs)
    return nbytes, statistics.median(own for _, own in pairs), share


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(_CUDA_CALLS):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / _CUDA_CALLS


def _cells(nbytes: int, seconds: float, share: float) -> list[str]:
    return [f"{1e3 * seconds:.3f}", f"{nbytes / seconds / 1e9:.1f}", f"{share:.2f}"]
