"""Sample: what a monitor reports about the steps since its last report."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from time import perf_counter
from typing import Any

from torch import Tensor

from zcomm.ddp.compressor import DdpCompressor
from zcomm.engine.counters import Stats
from zcomm.monitor.layer_figures import Layer, LayerFigures


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank at the end of backward(), named as in zcomm.plan.

    parameters   the model's, including frozen ones
    residuals    what compression has left out so far
    buffers      the engine's, for chunks in flight; this rank's shared segment is part of them
    core         what the native core holds in this process, for all models
    optimizer    with ZeRO: the state of this rank's shards; otherwise None
    masters      with ZeRO: fp32 copies of what this rank owns; otherwise None
    """

    parameters: int
    residuals: int
    buffers: int
    core: int
    optimizer: int | None = None
    masters: int | None = None


@dataclass(frozen=True)
class Sample:
    """This rank's steps since the last sample.

    step           how many steps there have been; a step is one synchronized backward()
    steps          how many of them this sample covers; the values below are their means
    step_s         wall time from the end of one backward() to the end of the next
    raw_bytes      what an uncompressed run would have sent; wire_bytes: what was sent; of that,
                   shared_bytes went through memory that the ranks of a host share
    encode_s, wait_s, decode_s   of the engine, which runs alongside backward()
    exposed_s      how long backward() waited for the engine at its end
    memory         at this moment

    With ZeRO, bytes and times include those of parameters.

    grad_norm, residual_norm, compression_error, layers   of the last step, if it was measured
                   (`layers_every`): over all layers together, and for each by its parameter's
                   name; see Layer. Otherwise None, and no layers
    """

    rank: int
    step: int
    steps: int
    step_s: float
    raw_bytes: float
    wire_bytes: float
    shared_bytes: float
    encode_s: float
    wait_s: float
    decode_s: float
    exposed_s: float
    memory: Memory
    grad_norm: float | None = None
    residual_norm: float | None = None
    compression_error: float | None = None
    layers: Mapping[str, Layer] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent; 1 if none were."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def scalars(self) -> dict[str, float]:
        """All values by name: "wire_bytes", "memory/buffers", "layer/<name>/grad_norm", ..."""
        found = {"ratio": self.ratio} if self.wire_bytes else {}
        found |= _numbers(self, "", leave_out=("rank", "step", "steps"))
        found |= _numbers(self.memory, "memory/")
        for name, layer in self.layers.items():
            found |= _numbers(layer, f"layer/{name}/")
        return found


def _numbers(of: Any, prefix: str, leave_out: tuple[str, ...] = ()) -> dict[str, float]:
    values = ((f.name, getattr(of, f.name)) for f in fields(of) if f.name not in leave_out)
    return {f"{prefix}{name}": v for name, v in values if isinstance(v, (int, float))}


# Totals that a sample averages over its steps.
_TOTALS = tuple(f.name for f in fields(Stats) if f.name != "steps")


class Meter:
    """Turns a compressor's totals into samples."""

    def __init__(self, compressor: DdpCompressor) -> None:
        self._begin(compressor.stats())

    def _begin(self, totals: Stats) -> None:
        self._totals, self._started, self._steps = totals, perf_counter(), 0

    def count_step(self) -> None:
        self._steps += 1

    def sample(self, compressor: DdpCompressor, figures: LayerFigures | None) -> Sample:
        """Covers the steps since the last sample; there must be at least one."""
        steps, before, totals = self._steps, self._totals, compressor.stats()
        means = {n: (getattr(totals, n) - getattr(before, n)) / steps for n in _TOTALS}
        step_s = (perf_counter() - self._started) / steps
        self._begin(totals)
        whole, layers = figures.finish() if figures else (None, {})
        return Sample(
            compressor.rank,
            totals.steps,
            steps,
            step_s,
            **means,
            memory=memory_of(compressor),
            **(asdict(whole) if whole else {}),
            layers=layers,
        )


def memory_of(compressor: DdpCompressor) -> Memory:
    ddp = compressor.ddp()
    optimizer = compressor.optimizer() if compressor.optimizer else None
    core: Any = sys.modules.get("zcomm._core")  # None where only the reference kernels run
    of_zero: dict[str, int] = {}
    if optimizer is not None:
        states = optimizer.inner.state.values()
        masters = [s.tensor for s in optimizer.shards.values() if s.has_master]
        of_zero["optimizer"] = nbytes(v for state in states for v in state.values())
        of_zero["masters"] = nbytes(masters)
    return Memory(
        parameters=nbytes(ddp.parameters()) if ddp is not None else 0,
        residuals=compressor.feedback.nbytes(),
        buffers=compressor.buffer_nbytes(),
        core=core.allocated_nbytes()[0] if core else 0,
        **of_zero,
    )


def nbytes(values: Any) -> int:
    return sum(v.nbytes for v in values if isinstance(v, Tensor))
