"""A training step on paper: what computing takes, and what communication adds to it.

DDP hands over bucket after bucket while backward goes on. With b buckets, the first can be sent
when 1/b of backward is done, the last when all of it is:

    after = max(comm / b, comm - backward · (1 - 1/b))

Where codecs and bytes take the cores that compute, backward itself takes longer, by what they take
for all buckets but the last. What an optimizer's step gathers after backward is exposed in whole.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from zcomm.planning import cost
from zcomm.planning.cost import Cluster, Estimate, Profile

BUCKET_NBYTES = 25 << 20  # DDP's default


class Training(NamedTuple):
    """What is trained, and how long a step computes."""

    numel: int
    itemsize: int  # of gradients, which the backend's own collective sends as they are
    step_s: float
    backward_share: float
    shares_cores: bool  # communication takes its processor time from the computing


class Way(NamedTuple):
    """Stage 0 is DDP, 1 is ZeRO. The codec is OWN for DDP alone."""

    stage: int
    codec: str
    gather_codec: str | None = None  # of the parameters, at stage 1


class StepTime(NamedTuple):
    compute_s: float
    hidden_s: float
    exposed_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s


def step_time(profile: Profile, training: Training, way: Way, cluster: Cluster) -> StepTime:
    numel, itemsize = training.numel, training.itemsize
    kind = "reduce_scatter" if way.stage else "all_reduce"
    sent = cost.estimate(profile, kind, numel, way.codec, cluster, itemsize)
    exposed_s = exposed_in_backward(training, sent)
    total_s = sent.s
    if way.stage:
        assert way.gather_codec is not None
        gathered = cost.estimate(profile, "all_gather", numel, way.gather_codec, cluster)
        exposed_s, total_s = exposed_s + gathered.s, total_s + gathered.s
    return StepTime(training.step_s, max(total_s - exposed_s, 0.0), exposed_s)


def exposed_in_backward(training: Training, sent: Estimate) -> float:
    buckets = math.ceil(training.numel * training.itemsize / BUCKET_NBYTES)
    early = 1 - 1 / buckets
    slower_s = sent.processor_s * early if training.shares_cores else 0.0
    backward_s = training.step_s * training.backward_share * early + slower_s
    return slower_s + max(sent.s / buckets, sent.s - backward_s)
