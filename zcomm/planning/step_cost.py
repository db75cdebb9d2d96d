"""The time of a training step: what it computes, and what communication adds.

DDP hands over one bucket after another during backward. With b buckets, the first is ready when 1/b
of backward is done and the last when backward ends:

    after = max(comm / b, comm - backward · (1 - 1/b))

If communication runs on the cores that compute, it slows backward down by the time it takes for all
buckets but the last. What the optimizer's step gathers after backward is fully exposed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from zcomm.planning import cost
from zcomm.planning.cost import Cluster, Estimate, Profile

BUCKET_NBYTES = 25 << 20  # DDP's default


class Workload(NamedTuple):
    """The model, and how long a step computes."""

    numel: int
    itemsize: int  # of gradients, which the backend's own collective sends unchanged
    step_s: float
    backward_share: float
    shares_cores: bool  # communication runs on the cores that compute


class Strategy(NamedTuple):
    """Stage 0 is DDP, stage 1 is ZeRO. The codec is OWN for DDP alone."""

    stage: int
    codec: str
    gather_codec: str | None = None  # for parameters, at stage 1


class StepTime(NamedTuple):
    compute_s: float
    hidden_s: float
    exposed_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s


def step_time(
    profile: Profile, workload: Workload, strategy: Strategy, cluster: Cluster
) -> StepTime:
    numel, itemsize = workload.numel, workload.itemsize
    kind = "reduce_scatter" if strategy.stage else "all_reduce"
    sent = cost.estimate(profile, kind, numel, strategy.codec, cluster, itemsize)
    exposed_s = exposed_in_backward(workload, sent)
    total_s = sent.s
    if strategy.stage:
        assert strategy.gather_codec is not None
        gathered = cost.estimate(profile, "all_gather", numel, strategy.gather_codec, cluster)
        exposed_s, total_s = exposed_s + gathered.s, total_s + gathered.s
    return StepTime(workload.step_s, max(total_s - exposed_s, 0.0), exposed_s)


def exposed_in_backward(workload: Workload, sent: Estimate) -> float:
    buckets = math.ceil(workload.numel * workload.itemsize / BUCKET_NBYTES)
    early = 1 - 1 / buckets
    slower_s = sent.processor_s * early if workload.shares_cores else 0.0
    backward_s = workload.step_s * workload.backward_share * early + slower_s
    return slower_s + max(sent.s / buckets, sent.s - backward_s)
