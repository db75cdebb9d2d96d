"""ZeroOptimizer: ZeRO stage 1. Each rank keeps and updates its runs of the parameters.

backward()   the hook sums each owner's run of every gradient    reduce-scatter, overlapped
step()       `inner` updates this rank's runs                    1/W of the work and the state
             all ranks gather the parameters                     exact, or as differences
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from zcomm.base import arguments
from zcomm.ddp.hook import HookState, group_of_call, model_without_hook, register
from zcomm.ddp.observers import WeakHook
from zcomm.ddp.parameters import trainable
from zcomm.sharding.hierarchy import Hierarchy
from zcomm.sharding.settings import SETTING_NAMES, Codecs, Settings, of_parameters
from zcomm.torch_private import foreach, state_dicts
from zcomm.torch_private.autograd import Range, eager
from zcomm.transport.handshake import tells_others
from zcomm.zero import consolidate, state, torch_format
from zcomm.zero.elementwise import OptimizerSpec
from zcomm.zero.gradients import agree, gather_run, global_norm
from zcomm.zero.groups import ShardedGroups, compared
from zcomm.zero.parameter_gather import Gathers
from zcomm.zero.sharded_gradient import ShardedGradient
from zcomm.zero.shards import GradientShards, OwnGradients, Shard

_OWN_NAMES = (*SETTING_NAMES, "param_codec", "scaler")


class ZeroOptimizer(Optimizer):
    """A torch.optim.Optimizer for a DDP model that shards its state over the ranks (ZeRO-1).

    All ranks make it after wrapping the model, in place of `optimizer_class(params, ...)`.
    `opt.inner` is the torch optimizer of this rank's shards, `opt.handle` what zcomm.compress
    returns.

    ddp              the wrapped model; in a world of one process it may be unwrapped
    optimizer_class  a class of torch.optim that updates element by element
    params           as for any optimizer: None (all that are trained), an iterable, or groups
    codec            of the gradients: "none" (exact), "auto" (measures and chooses), a spec, a dict
                     of name patterns and specs, or a Hierarchy
    param_codec      of the parameters, as differences; None gathers them exactly
    lr               the learning rate; None: the default of `optimizer_class`
    scaler           the GradScaler, if the loop uses one
    feedback         error feedback: None (the codec's best), True, False, or a decay from 0 to 1
    start_step       earlier steps are uncompressed
    chunk_mb         fp32 megabytes encoded and sent at a time; None: the best for the group
    timeout_s        seconds to wait for other ranks; None: the group's timeout
    verify           whether frames carry checksums
    min_numel        smaller parameters are sent uncompressed
    residual_dtype   how residuals are stored: fp32, bf16 or int8
    threads          threads for the codecs; None: torch's number
    optimizer_options  all other keywords go to `optimizer_class`
    """

    @tells_others("ZeroOptimizer", group_of_call)
    def __init__(
        self,
        ddp: nn.Module,
        optimizer_class: Any,
        params: Any = None,
        codec: Codecs | Hierarchy = "none",
        param_codec: Codecs | None = None,
        *,
        lr: Any = None,
        scaler: Any = None,
        feedback: bool | float | None = None,
        start_step: int = 0,
        chunk_mb: float | None = None,
        timeout_s: float | None = None,
        verify: bool = True,
        min_numel: int = 1024,
        residual_dtype: torch.dtype | str = torch.float32,
        threads: int | None = None,
        **optimizer_options: Any,
    ) -> None:
        model = model_without_hook(ddp, "ZeroOptimizer")
        hook_state = HookState(
            codec,
            scaler=scaler,
            feedback=feedback,
            start_step=start_step,
            chunk_mb=chunk_mb,
            timeout_s=timeout_s,
            verify=verify,
            min_numel=min_numel,
            residual_dtype=residual_dtype,
            threads=threads,
        )
        param_settings = _param_settings(param_codec, min_numel)
        given = {} if lr is None else {"lr": lr}
        spec = OptimizerSpec(optimizer_class, {**given, **optimizer_options})
        spec.expect_known(list(optimizer_options), _OWN_NAMES)
        named = trainable(model)
        super().__init__(list(named.values()) if params is None else params, spec.defaults())
        for group in self.param_groups:
            spec.state_kinds(group)
        both = compared(spec, param_settings, self.param_groups, named)
        self.compressor = hook_state.bind(model, both, "ZeroOptimizer", "reduce_scatter")
        self.handle = hook_state.handle
        self._gradients = self._make_gradients(model)
        self._groups = ShardedGroups(
            self.param_groups, spec, self.compressor, param_settings, self._gradients
        )
        self.inner = self._groups.inner
        self._gathers = Gathers(self.compressor, param_settings)
        self.state = torch_format.ShardStates(self._groups)  # type: ignore[assignment]
        self._connect(model, hook_state)

    def _make_gradients(self, model: nn.Module) -> GradientShards:
        if not self.compressor.is_wrapped:
            return OwnGradients(WeakMethod(self._unscale))
        return GradientShards(WeakMethod(self._unscale), bool(model.gradient_as_bucket_view))

    def _connect(self, model: nn.Module, hook_state: HookState) -> None:
        """From now on the hook brings this rank's sums of the gradients."""
        self.compressor.optimizer = ref(self)
        self.compressor.buckets.sink = self._gradients
        if getattr(model, "gradient_as_bucket_view", False):
            model.register_forward_pre_hook(WeakHook(self._gradients.hide))
            model.register_forward_hook(WeakHook(self._gradients.show), always_call=True)
        register(hook_state, model)

    @property
    def shards(self) -> Mapping[str, Shard]:
        """This rank's shards, by parameter name."""
        return self._gradients.shards

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. All ranks must call it; the next step() compares the groups."""
        super().add_param_group(param_group)
        if not hasattr(self, "_groups"):  # torch's constructor calls this for its own groups
            return
        self._groups.add(self.param_groups.pop())  # popped: a refused group leaves nothing behind
        self._gathers.clear()

    # A step.

    @eager
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates this rank's runs and gathers all parameters. All ranks must call it."""
        if closure is not None:
            raise ValueError(
                "step: expected no closure, got one: it would run backward() inside step(), as "
                "often as each rank's own loss demands; call backward() before step()"
            )
        self.compressor.raise_failure()
        changed = self._follow_changes()
        self._groups.set_gradients()
        given = self._groups.step()
        self._gather_parameters(f"step {self.compressor.step}", given + changed)

    def _follow_changes(self) -> str:
        """Follows parameters that changed outside step(); says which, for all ranks to compare.

        Without a master the run is the parameter itself: only a move to other memory matters.
        """
        names = []
        for shard in [shard for shard in self.shards.values() if shard.changed()]:
            if shard.moved():
                self._gathers.clear()
            shard.rebind()
            if shard.has_master:
                shard.update_master()
                names.append(f"{shard.name} ({_checksum(shard.flat):x})")
            shard.mark_unchanged()
        return f", after a change of {', '.join(names)}" if names else ""

    def _gather_parameters(self, what: str, note: str = "", exact: bool = False) -> None:
        shards = self.shards.values()
        with Range("zcomm::gather_parameters"):
            self._gathers.run(shards, what, note, exact)
        increment_version([shard.parameter for shard in shards])
        for shard in shards:
            shard.loaded_run = None
            shard.mark_unchanged()

    @torch.no_grad()
    def sync_parameters(self) -> None:
        """Gives all ranks the exact parameters, rounded only to their dtype. All must call it.

        With `param_codec` the parameters lag behind the owners' masters by what the codec left
        out; call this before evaluation and export. Training continues from the exact values.
        """
        self.compressor.raise_failure()
        changed = self._follow_changes()
        self._gather_parameters("sync_parameters", changed, exact=True)

    @torch.no_grad()
    def reload_parameters(self) -> None:
        """Sets the owners' masters to the parameters' values, on this rank.

        step() notices parameters that load_state_dict() or an in-place operation changed. It
        cannot see writes to `p.data` or by code outside torch: where there are masters (bf16 and
        fp16 parameters, `param_codec`), call this on all ranks after those.
        """
        for shard in self.shards.values():
            shard.rebind()
            if shard.has_master:
                shard.tensor.copy_(shard.run)
            shard.loaded_run = None
            shard.mark_unchanged()
        self._gathers.clear()

    # Gradients.

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales all gradients so that their norm is at most `max_norm`; returns the norm.

        The norm is over all ranks' shards: what torch.nn.utils.clip_grad_norm_ computes for the
        whole gradient, up to rounding. All ranks must call it.
        """
        if norm_type <= 0:
            raise ValueError(f"clip_grad_norm_: expected norm_type > 0, got {norm_type}")
        self.compressor.raise_failure()
        self._groups.set_gradients()
        sums = [s.sum for s in self.shards.values() if s.tensor.grad is not None]
        norm = global_norm(self.compressor, sums, float(norm_type))
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"clip_grad_norm_: expected a finite norm of order {norm_type}, got {norm}"
            )
        factor = float(max_norm) / (norm + 1e-6)
        if sums and not factor >= 1.0:  # a NaN spreads, as in torch
            foreach.mul_(sums, factor)
        return torch.tensor(norm, device=self.compressor.device)

    def _unscale(
        self, gradients: Sequence[ShardedGradient], found_inf: Tensor, inv_scale: Tensor
    ) -> None:
        """Does what GradScaler does to gradients, on shards; all ranks get the same found_inf."""
        sums = [g.shard for g in gradients]
        foreach.unscale_(sums, found_inf, inv_scale)
        found_inf.fill_(max(agree(self.compressor, float(found_inf))))

    @torch.no_grad()
    def full_grad(self, p: Tensor) -> Tensor | None:
        """The whole mean gradient of a parameter, gathered from its owners; None if it has none.

        All ranks must call it.
        """
        self.compressor.raise_failure()
        shard = self._groups.shard_of(p)
        if shard is None:
            raise ValueError(
                f"rank {self.compressor.rank}: full_grad: expected a parameter of this optimizer, "
                f"got another tensor, {arguments.describe(p)}"
            )
        self._groups.set_gradients()
        if p.grad is None:
            return None
        whole = gather_run(self.compressor, shard, shard.sum, "full_grad")
        return whole.to(p.dtype).as_strided(p.shape, p.stride())

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, for torch.distributed.checkpoint; see zcomm.save_checkpoint.

        Its tensors are the optimizer's own memory. consolidated_state_dict() has the format of an
        ordinary optimizer. torch's get_optimizer_state_dict and its siblings get what they get
        from an ordinary optimizer.
        """
        asked = state_dicts.asked()
        if asked is not None:
            return torch_format.state_dict(self._groups, asked)
        return state.state_dict(self._groups)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        """Loads what state_dict() returned, or the state of an ordinary torch optimizer.

        All ranks must call it. Ranks without the ordinary state pass None; the first rank that
        has it sends them their runs.
        """
        asked = state_dicts.asked()
        if asked is not None and asked.from_rank_0 and self.compressor.rank > 0:
            # torch has sent it, but mixes up the elements of tensors that are not contiguous.
            state_dict = None
        if state_dict is None or consolidate.is_ordinary_state(state_dict):
            consolidate.load_ordinary(self._groups, state_dict)
            return
        for shard, run in state.load_state_dict(self._groups, state_dict):
            shard.flat.copy_(gather_run(self.compressor, shard, run, "load_state_dict"))
            shard.mark_unchanged()

    def expect_fit(self, state_dict: Mapping[str, Any]) -> None:
        """Refuses the state of another model, optimizer or codec; needs only its `about`."""
        state.checked_about(self._groups, state_dict)

    @torch.no_grad()
    def consolidated_state_dict(self, to: int = 0) -> dict[str, Any] | None:
        """The state in the format of the ordinary torch optimizer, on rank `to`; None elsewhere.

        All ranks must call it. Tensors are sent one at a time: the other ranks never hold more
        than their shards.
        """
        return consolidate.consolidate(self._groups, to)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "ZeroOptimizer: expected not to be copied or pickled, because it belongs to one DDP "
            "model and its hook; copy or save its state, such as copy.deepcopy(opt.state_dict()) "
            "or zcomm.save_checkpoint(folder, {'optimizer': opt}, step)"
        )

    def close(self) -> None:
        """Ends the engine. Neither the optimizer nor its hook can be used afterwards."""
        self.compressor.close()


def _param_settings(codec: Codecs | None, min_numel: int) -> Settings | None:
    if isinstance(codec, Hierarchy):
        raise TypeError(
            "ZeroOptimizer: expected param_codec as a codec or patterns, got a Hierarchy: "
            "give that as codec=; parameters then take the same way"
        )
    return None if codec is None else of_parameters(codec, min_numel)


def _checksum(flat: Tensor) -> int:
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[flat.element_size()]
    return int(flat.view(words).sum(dtype=torch.int64)) & 0xFFFFFFFF
