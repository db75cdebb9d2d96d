"""Native jobs: those that native code takes through the ring as a whole."""

from typing import Any, NamedTuple, Protocol

from zcomm.engine.job import Job
from zcomm.engine.pipeline import Pipeline
from zcomm.kernels.base import Fault

# csrc/shm/turns.h: publish, reduce, collect.
_COLLECT = 2


class Refused(NamedTuple):
    """A refused wire. It was refused while the frames of `summed` were summed, or, if that is None,
    while those of all owners were decoded."""

    fault: Fault
    summed: int | None


class End(NamedTuple):
    """How a job ended: what its last wait saw (None: all is done), in which step of which of its
    chunks, and the seconds that the steps took. `begun`: a job of one exchange can go on there."""

    seen: tuple[int, ...] | None
    step: int
    chunk: int
    chunks: int
    begun: int | None
    publish_s: float
    reduce_s: float
    collect_s: float
    refused: Refused | None = None

    def hop(self, job: Job) -> str:
        collects = self.step == _COLLECT or not job.collective.reduce
        return "all-gather" if collects else "reduce-scatter"


class Native(Protocol):
    """A way to run a job in native code."""

    def run(self, ring: Any, job: Job, call: Any, pipeline: Pipeline) -> End:
        """Runs it as far as the other ranks let it, or until a wire is refused."""

    def place(self, job: Job, end: End) -> str:
        """Where it ended, for errors."""

    def sent_nbytes(self, job: Job, end: End) -> int:
        """What the peers read of this rank's memory."""
