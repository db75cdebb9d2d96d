"""FSDP2: `zcomm.fsdp.compress(model)` for a model with `fully_shard`.

`reshard_after_forward=False` is ZeRO stage 2, `True` stage 3: what they send is the same here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from zcomm.codecs import Codec
from zcomm.engine.handle import Handle
from zcomm.engine.job import Job
from zcomm.fsdp.compressor import FsdpCompressor
from zcomm.fsdp.modules import ShardedModule, sharded_modules, torch_all_gather
from zcomm.fsdp.state import FsdpSavedState
from zcomm.sharding.hierarchy import Hierarchy
from zcomm.sharding.settings import SETTING_NAMES, Settings
from zcomm.torch_private.fsdp import AllGather, ReduceScatter

Codecs = str | Codec | Mapping[str, str | Codec]


def compress(
    model: Any,
    codec: Codecs = "lm4",
    param_codec: Codecs | None = None,
    *,
    residual_dtype: torch.dtype | str | None = None,
    **settings: Any,
) -> Handle:
    """Compresses the gradients of a model with fully_shard, from its next backward() on.

    All ranks call it, after the last fully_shard and before training. `codec` is a spec, or a dict
    of patterns of parameter names, for gradients; `param_codec` the same for the parameters as they
    are gathered for forward and backward: None gathers them exactly. The shards themselves, which
    the optimizer updates, are never encoded. Other settings: see zcomm.Settings.

    Residuals, where a codec has feedback, take as much as the whole model on every rank. They are
    int8, or bf16 with a decay, unless `residual_dtype` says otherwise.
    """
    for name in settings:
        if name not in SETTING_NAMES:
            known = ", ".join(SETTING_NAMES)
            raise TypeError(f"zcomm.fsdp.compress: expected settings {known}, got {name!r}")
    if isinstance(codec, Hierarchy) or isinstance(param_codec, Hierarchy):
        raise TypeError(
            "zcomm.fsdp.compress: expected a codec or patterns, got a Hierarchy: FSDP2 has one hop "
            "here; use fully_shard with a 2-D mesh (HSDP) to keep collectives inside of hosts"
        )
    of_gradients = _settings(codec, residual_dtype, settings)
    of_parameters = None
    if param_codec is not None:
        of_parameters = _param_settings(param_codec, of_gradients.min_numel)
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
    ) -> None:
        used = self._module.reduced(input_tensor.numel(), depth=1)
        self._compressor.reduce(self._module, output_tensor, input_tensor, op, used)


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
        # Also without async_op: FSDP waits for what it gets before it reads the parameters.
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


def _settings(
    codec: Codecs, residual_dtype: torch.dtype | str | None, settings: Mapping[str, Any]
) -> Settings:
    if residual_dtype is not None:
        return Settings(codec, residual_dtype=residual_dtype, **settings)
    tried = Settings(codec, **settings)
    decays = any(isinstance(tried.mode(used), float) for used in tried.codecs())
    # int8 residuals cannot decay.
    return Settings(codec, residual_dtype=torch.bfloat16 if decays else torch.int8, **settings)


def _param_settings(codec: Codecs, min_numel: int) -> Settings:
    made = Settings(codec, min_numel=min_numel)
    for used in made.codecs():
        if used.needs_feedback:
            raise ValueError(
                f"param_codec: expected a codec that sends all of a weight, such as 'int8', got "
                f"{used.spec!r}, which leaves most to later steps: there are none for weights"
            )
    return made
