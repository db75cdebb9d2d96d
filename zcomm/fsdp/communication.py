"""compress for FSDP2, and the two collectives that FSDP calls for each module."""

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from zcomm.engine.handle import Handle
from zcomm.engine.job import Job
from zcomm.fsdp.compressor import FsdpCompressor
from zcomm.fsdp.modules import (
    ShardedModule,
    sharded_modules,
    torch_all_gather,
    torch_reduce_scatter,
)
from zcomm.fsdp.state import FsdpSavedState
from zcomm.sharding.hierarchy import Hierarchy
from zcomm.sharding.settings import AUTO, Codecs, Settings, of_parameters
from zcomm.torch_private.fsdp import AllGather, ReduceScatter


def compress(
    model: Any,
    codec: Codecs | Hierarchy = AUTO,
    param_codec: Codecs | None = None,
    *,
    feedback: bool | float | None = None,
    start_step: int = 0,
    chunk_mb: float | None = None,
    timeout_s: float | None = None,
    verify: bool = True,
    min_numel: int = 1024,
    residual_dtype: torch.dtype | str | None = None,
    threads: int | None = None,
) -> Handle:
    """Compresses the gradients of a model with fully_shard, starting with its next backward().

    All ranks call it after the last fully_shard and before training. The shards that the optimizer
    updates are never encoded.

    codec           of the gradients: "auto" (measures the links and chooses), a spec, a dict of
                    name patterns and specs, or a Hierarchy
    param_codec     of the parameters when forward and backward gather them; None: exact
    feedback        error feedback: None (the codec's best), True, False, or a decay from 0 to 1
    start_step      earlier steps are uncompressed
    chunk_mb        fp32 megabytes encoded and sent at a time; None: the best for the group
    timeout_s       seconds to wait for other ranks; None: the group's timeout
    verify          whether frames carry checksums
    min_numel       smaller parameters are sent uncompressed
    residual_dtype  how residuals are stored; None: int8, or bf16 with a decay. With feedback, each
                    rank keeps residuals of the whole model
    threads         threads for the codecs; None: torch's number
    """
    if isinstance(param_codec, Hierarchy):
        raise TypeError(
            "zcomm.fsdp.compress: expected param_codec as a codec or patterns, got a Hierarchy: "
            "give that as codec=; parameters then take the same way"
        )
    of_gradients = Settings(
        codec,
        feedback=feedback,
        start_step=start_step,
        chunk_mb=chunk_mb,
        timeout_s=timeout_s,
        verify=verify,
        min_numel=min_numel,
        residual_dtype=torch.float32 if residual_dtype is None else residual_dtype,
        threads=threads,
    )
    if residual_dtype is None:
        of_gradients = _with_small_residuals(of_gradients)
    of_parameters = None if param_codec is None else _param_settings(param_codec, min_numel)
    modules = sharded_modules(model)
    compressor = FsdpCompressor(modules, of_gradients, of_parameters)
    for module in modules:
        module.set_collectives(
            CompressedReduceScatter(compressor, module), CompressedAllGather(compressor, module)
        )
    return Handle(compressor, FsdpSavedState(compressor))


class CompressedReduceScatter(ReduceScatter):  # type: ignore[misc]
    """The reduce-scatter of one FSDP module's gradients."""

    def __init__(self, compressor: FsdpCompressor, module: ShardedModule) -> None:
        self._compressor, self._module = compressor, module

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._compressor.make_room(self._module)
        return torch.empty(math.prod(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if self._module.world_size == 1:  # torch 2.9 does not leave it out
            return torch_reduce_scatter(output_tensor, input_tensor, group, op, async_op)
        used = self._module.reduced(input_tensor.numel(), depth=1)
        self._compressor.reduce(self._module, output_tensor, input_tensor, op, used)
        return None


class CompressedAllGather(AllGather):  # type: ignore[misc]
    """The all-gather of one FSDP module's parameters."""

    def __init__(self, compressor: FsdpCompressor, module: ShardedModule) -> None:
        self._compressor, self._module = compressor, module

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(math.prod(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        if not self._compressor.can_gather(self._module, input_tensor, group):
            return torch_all_gather(output_tensor, input_tensor, group, async_op)
        # Without async_op, too: FSDP waits for this work before it reads the parameters.
        job = self._compressor.gather(self._module, output_tensor, input_tensor)
        return GatherWork(self._compressor, job)


class GatherWork(torch.distributed.Work):
    """An all-gather under way, as FSDP waits for it."""

    def __init__(self, compressor: FsdpCompressor, job: Job) -> None:
        super().__init__()
        self._compressor, self._job = compressor, job

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._compressor.wait(self._job)
        return True

    def is_completed(self) -> bool:
        return self._job.completed()


def _with_small_residuals(settings: Settings) -> Settings:
    """With int8 residuals, or bf16 where a codec's feedback decays: int8 residuals cannot."""
    decays = any(isinstance(settings.mode(used), float) for used in settings.codecs())
    codec = settings.hierarchy or settings.codec
    return replace(settings, codec=codec, residual_dtype=torch.bfloat16 if decays else torch.int8)


def _param_settings(codec: Codecs, min_numel: int) -> Settings:
    made = of_parameters(codec, min_numel)
    for used in made.codecs():
        if used.needs_feedback:
            raise ValueError(
                f"param_codec: expected a codec that sends all of a weight, such as 'int8', got "
                f"{used.spec!r}, which leaves most to later steps: there are none for weights"
            )
    return made
