"""Encode and decode in a CUDA graph: replays give the same bits as direct calls."""

import torch

from zcomm.codecs import codec
from zcomm.codecs.layout import Layout, Residuals, Segment
from zcomm.conformance.contract import Outcome, Subject, gradient
from zcomm.kernels.device import NO_FAULT, new_faults
from zcomm.report.finding import NOTE, Finding
from zcomm.selftest.tally import Scope, Tally

_NUMEL = 100_003
_REPLAYS = 2


def check(scope: Scope) -> Finding:
    if scope.subject.device.type != "cuda":
        return Finding(NOTE, ["skipped: only CUDA devices have graphs"])
    tally = Tally()
    for spec in scope.specs:
        with tally.guarded(spec, "capture"):
            _check_replays(tally, spec, scope.subject)
    right = f"encode with residual and decode, captured and replayed {_REPLAYS} times: bit for bit"
    return tally.finding(right)


class _Step:
    """Encodes a gradient with a residual, which it updates, and decodes the wire."""

    def __init__(self, spec: str, subject: Subject) -> None:
        device = subject.device
        self.kernels = subject.kernels
        self.layout = Layout([Segment(codec(spec), _NUMEL)])
        self.grad = gradient(_NUMEL, ["normal", "outlier", "ties"], torch.float32).to(device)
        self.residual = torch.zeros(_NUMEL, device=device)
        self.held = Residuals(self.layout, [self.residual])
        self.wire = torch.zeros(self.layout.wire_nbytes, dtype=torch.uint8, device=device)
        self.decoded = torch.zeros(_NUMEL, device=device)
        self.faults = new_faults(device)

    def run(self) -> None:
        self.layout.encode(self.grad, self.held, out=self.wire, kernels=self.kernels)
        self.layout.decode(self.wire, out=self.decoded, kernels=self.kernels, faults=self.faults)

    def clear(self) -> None:
        for t in (self.residual, self.wire, self.decoded):
            t.zero_()

    def outcome(self) -> Outcome:
        now = (self.wire, self.residual, self.decoded)
        return Outcome(*(t.to("cpu", copy=True) for t in now))


def _check_replays(tally: Tally, spec: str, subject: Subject) -> None:
    step = _Step(spec, subject)
    # The first call on a stream makes the layout's tables and scratch memory.
    stream = torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(subject.device))
    expected: list[Outcome] = []
    with torch.cuda.stream(stream):
        for _ in range(_REPLAYS):
            step.run()
            expected.append(step.outcome())
        step.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step.run()
    with torch.cuda.stream(stream):
        for i, wanted in enumerate(expected):
            graph.replay()
            for name, got in step.outcome()._asdict().items():
                what = f"{name} of replay {i + 1}"
                tally.same(spec, what, got, getattr(wanted, name))
    none = torch.tensor([NO_FAULT], dtype=torch.int32)
    tally.same(spec, "faults", step.faults.cpu().to(torch.int32), none)
