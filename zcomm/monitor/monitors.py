"""Monitors show what compression does while training runs.

    zcomm.monitor.Log(handle)                          a line every 50 steps, on rank 0
    zcomm.monitor.TensorBoard(handle, SummaryWriter()) bytes, times, memory; norms of each layer
    zcomm.monitor.Callback(handle, print)              passes a Sample to any function

`handle` is what zcomm.compress returned, or a zcomm.ZeroOptimizer. A monitor covers this rank only:
create it on rank 0 or on any ranks you like. It sends nothing and changes no bit of the training.
Most steps cost it a few additions. Every `layers_every`-th step takes longer, because each gradient
is read and encoded once more.

A monitor lives as long as its model, or until detach(); `with zcomm.monitor.Log(handle):` detaches
it at the end. An error in it, say in a callback, is raised unchanged by backward(), after DDP has
finished: training can continue.

torch.profiler shows zcomm's work as ranges. On backward()'s thread: `zcomm::hook` (handing over a
bucket), `zcomm::exposed` (the wait at the end) and, in a ZeroOptimizer's step(),
`zcomm::gather_parameters`. On zcomm's own thread: `zcomm::encode`, `zcomm::send`, `zcomm::wait`,
`zcomm::decode_sum`, `zcomm::encode_own` and `zcomm::decode`; in shared memory `zcomm::exchange`,
for all of it. torch must be told to profile that thread:

    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=config) as profiler: ...
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from zcomm.base import arguments
from zcomm.base.log import say
from zcomm.ddp.buckets import Part
from zcomm.ddp.compressor import DdpCompressor
from zcomm.engine.handle import Handle
from zcomm.monitor.layer_figures import Layer, LayerFigures
from zcomm.monitor.samples import Memory, Meter, Sample
from zcomm.zero.optimizer import ZeroOptimizer

__all__ = ["Callback", "Layer", "Log", "Memory", "Monitor", "Sample", "TensorBoard"]

_LAYERS_EVERY = 100
_ON_MODEL = "_zcomm_monitors"

_M = TypeVar("_M", bound="Monitor")


class Monitor(ABC):
    """Reports a Sample every `every` steps; a subclass says where, and calls attach().

    Steps whose number is a multiple of `layers_every` include the figures of all layers and are
    reported too. With None, no step does.
    """

    def __init__(
        self, handle: Handle | ZeroOptimizer, every: int, layers_every: int | None
    ) -> None:
        self._every = arguments.count(every, "every", least=1)
        self._layers_every = layers_every
        if layers_every is not None:
            self._layers_every = arguments.count(layers_every, "layers_every", least=1)
        compressor = compressor_of(handle)
        # Weak, so that a monitor keeps neither a model nor its engine alive.
        self._compressor = weakref.ref(compressor)
        self._figures: LayerFigures | None = None
        self._meter = Meter(compressor)

    @abstractmethod
    def report(self, sample: Sample) -> None: ...

    def attach(self) -> None:
        """Starts reporting with the next step."""
        compressor = self._compressor()
        ddp = compressor and compressor.ddp()
        if compressor is None or ddp is None:
            raise RuntimeError(
                "monitor: expected the handle of a live model, got one whose model is gone"
            )
        ddp.__dict__.setdefault(_ON_MODEL, _Kept()).append(self)
        compressor.observers.add(self)

    def detach(self) -> None:
        """Stops reporting."""
        compressor = self._compressor()
        ddp = compressor and compressor.ddp()
        self._figures = None
        if compressor is not None:
            compressor.observers.discard(self)
        if ddp is not None and self in (kept := ddp.__dict__.get(_ON_MODEL, ())):
            kept.remove(self)

    def __enter__(self: _M) -> _M:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    # Called by the compressor.

    def take_bucket(self, index: int, parts: Sequence[Part], buffer: Tensor) -> None:
        if index == 0:
            self._figures = self._new_figures()
        if self._figures is not None:
            self._figures.take(parts, buffer)

    def end_step(self) -> None:
        compressor = self._compressor()
        assert compressor is not None, "it calls"
        self._meter.count_step()
        figures, self._figures = self._figures, None
        if figures is not None or compressor.step % self._every == 0:
            self.report(self._meter.sample(compressor, figures))

    def _new_figures(self) -> LayerFigures | None:
        compressor = self._compressor()
        assert compressor is not None, "it calls"
        due = self._layers_every and (compressor.step + 1) % self._layers_every == 0
        return LayerFigures(compressor) if due else None


class Callback(Monitor):
    """Calls `fn` with a Sample every `every` steps, and with layers every `layers_every` steps.

    The call comes at the end of backward(), before the optimizer's step. Unless all ranks have the
    callback, `fn` must not call collectives.
    """

    def __init__(
        self,
        handle: Handle | ZeroOptimizer,
        fn: Callable[[Sample], object],
        every: int = 10,
        layers_every: int | None = _LAYERS_EVERY,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn: expected a function of a Sample, got {arguments.describe(fn)}")
        super().__init__(handle, every, layers_every)
        self._fn = fn
        self.attach()

    def report(self, sample: Sample) -> None:
        self._fn(sample)


class TensorBoard(Monitor):
    """Writes `zcomm/wire_bytes`, `zcomm/layer/<name>/compression_error` and so on to a writer.

    `writer` is a torch.utils.tensorboard.SummaryWriter, or anything with add_scalar(tag, value,
    step). With None this rank writes nothing. The caller closes the writer.
    """

    def __init__(
        self,
        handle: Handle | ZeroOptimizer,
        writer: Any,
        every: int = 10,
        layers_every: int | None = _LAYERS_EVERY,
    ) -> None:
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(
                "writer: expected a torch.utils.tensorboard.SummaryWriter or None, got "
                f"{arguments.describe(writer)}"
            )
        super().__init__(handle, every, layers_every)
        self._writer = writer
        if writer is not None:
            self.attach()

    def report(self, sample: Sample) -> None:
        for name, value in sample.scalars().items():
            self._writer.add_scalar(f"zcomm/{name}", value, sample.step)


class Log(Monitor):
    """A line every `every` steps, on rank 0 or on all ranks.

    Lines go to `write` or, by default, to the logger "zcomm" at level INFO, or to stdout if logging
    is not set up. At most every 100 steps a line also has the norms of gradient and residual and
    the compression error, over all layers together.
    """

    def __init__(
        self,
        handle: Handle | ZeroOptimizer,
        every: int = 50,
        write: Callable[[str], object] | None = None,
        *,
        all_ranks: bool = False,
    ) -> None:
        if write is not None and not callable(write):
            got = arguments.describe(write)
            raise TypeError(f"write: expected a function of a line, such as print, got {got}")
        every = arguments.count(every, "every", least=1)
        # The smallest multiple of `every`, so that lines with norms come when lines are due.
        super().__init__(handle, every, every * -(-_LAYERS_EVERY // every))
        self._write = write or say
        self._all_ranks = all_ranks
        if all_ranks or compressor_of(handle).rank == 0:
            self.attach()

    def report(self, sample: Sample) -> None:
        self._write(line_of(sample, self._all_ranks))


def line_of(sample: Sample, with_rank: bool = False) -> str:
    times = "encode {:.1f}, wait {:.1f}, decode {:.1f}".format(
        *(1e3 * s for s in (sample.encode_s, sample.wait_s, sample.decode_s))
    )
    words = [
        f"step {sample.step}: {1e3 * sample.step_s:.1f} ms, exposed {1e3 * sample.exposed_s:.1f}",
        times,
        f"sent {sample.wire_bytes / 1e6:.3g} MB of {sample.raw_bytes / 1e6:.3g}",
    ]
    if sample.wire_bytes:
        words[-1] += f", {sample.ratio:.3g}x less"
    if sample.grad_norm is not None and sample.compression_error is not None:
        words.append(f"gradient {sample.grad_norm:.3g}, error {sample.compression_error:.2%}")
    if sample.residual_norm is not None:
        words[-1] += f", residual {sample.residual_norm:.3g}"
    return f"zcomm{f' rank {sample.rank}' if with_rank else ''} {'; '.join(words)}"


def compressor_of(handle: Any) -> DdpCompressor:
    handle = getattr(handle, "handle", handle)  # of a ZeroOptimizer or a HookState
    compressor = getattr(handle, "_compressor", None)
    if not isinstance(compressor, DdpCompressor):
        raise TypeError(
            "handle: expected what zcomm.compress returned, or a zcomm.ZeroOptimizer, got "
            f"{arguments.describe(handle)}"
        )
    return compressor


class _Kept(list[Monitor]):
    """A model keeps its monitors alive in this list. A copy of the model has none."""

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()
