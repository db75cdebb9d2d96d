"""Compares the choice of codec="auto" with the first steps of training, and decides once more.

Only in training is it known how long a step computes and how much of communication it hides:

    step    = compute + slowed + after
    slowed  = processor time of all buckets but the last, on the cores that compute
    after   = max(communication / buckets, communication − window)

The window is the time from the first bucket of a step to the last one. `compute` and what the
model is off by (`after`, measured less expected) come from the steps with the codec chosen first.
"""

import statistics
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from zcomm.engine.tuning.choice import Choice, Model, Option, best

# DDP has rebuilt its buckets before the first of these steps, also with static_graph.
FIRST_STEP, STEPS = 4, 7
# Nothing is exposed for less: between smaller times there is nothing to choose.
_LEAST_S = 1e-3


class Step(NamedTuple):
    """Seconds: of a step, of it exposed, and from its first bucket to the last."""

    s: float
    exposed_s: float
    window_s: float


class SelfCheck:
    """The clock of a model's first steps, those after `start_step`: before, none is sent."""

    def __init__(self, start_step: int = 0) -> None:
        self._start_step, self._begun = start_step, 0
        self._steps: list[Step] = []
        self._began = self._last_bucket = self._exposed_s = 0.0
        self.bucket_numels: list[int] = []

    def begin_step(self, step: int, exposed_s: float) -> None:
        """At the first bucket, where the last step ends; `exposed_s` is the total so far."""
        now = perf_counter()
        if self._begun > FIRST_STEP:
            window_s = self._last_bucket - self._began
            self._steps.append(Step(now - self._began, exposed_s - self._exposed_s, window_s))
        self._begun += step >= self._start_step
        self._began, self._exposed_s = now, exposed_s
        self.bucket_numels = []

    def take_bucket(self, numel: int) -> None:
        self._last_bucket = perf_counter()
        self.bucket_numels.append(numel)

    @property
    def is_due(self) -> bool:
        return len(self._steps) >= STEPS

    def typical(self) -> Step:
        return Step(*map(statistics.median, zip(*self._steps)))


def decided_again(choice: Choice, model: Model, step: Step, at: int) -> Choice:
    """The choice after comparing: another codec, or the same with what its steps should take."""
    expected = {one.codec: _parts(model, one) for one in choice.options}
    mine = expected[choice.codec]
    free_s = max(step.window_s - mine.slowed_s, 0.0)
    off_s = step.exposed_s - mine.after_s(free_s)
    compute_s = max(step.s - step.exposed_s - mine.slowed_s, 0.0)
    costs = {
        spec: max(parts.slowed_s + parts.after_s(free_s) + off_s, _LEAST_S)
        for spec, parts in expected.items()
    }
    options = tuple(replace(one, step_s=compute_s + costs[one.codec]) for one in choice.options)
    chosen = best(options, costs)
    reason = choice.reason
    if chosen != choice.codec:
        reason = (
            f"{reason}, then {chosen}: it exposes less"
            if costs[chosen] < costs[choice.codec]
            else f"{reason}, then {chosen}: backward hides it"
        )
    return replace(choice, codec=chosen, reason=reason, options=options, step=at)


class _Parts(NamedTuple):
    communication_s: float
    slowed_s: float
    buckets: int

    def after_s(self, free_s: float) -> float:
        """Exposed at the end of a backward whose window has `free_s` besides what slows it."""
        hidden_s = free_s + self.slowed_s
        return max(self.communication_s / self.buckets, self.communication_s - hidden_s)


def _parts(model: Model, option: Option) -> _Parts:
    estimates = model.estimates(option.codec, option.chunk_mb)
    slowed_s = sum(one.processor_s for one in estimates[:-1])
    return _Parts(sum(one.s for one in estimates), slowed_s, len(estimates))
