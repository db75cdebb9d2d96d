"""ShardedOptimizer: ZeRO stage 1. Every rank keeps and updates its runs of the parameters.

backward()   the hook sums each owner's run of every gradient    reduce-scatter, overlapped
step()       `inner` updates this rank's runs                    1/W of the work and the state
             all ranks gather the parameters                     exact, or as differences
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakMethod, ref

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zcomm.base import arguments
from zcomm.ddp.compressor import DdpCompressor
from zcomm.sharding.settings import Settings
from zcomm.torch_private import foreach
from zcomm.torch_private.profiler import Range
from zcomm.zero import consolidate as zero_consolidate
from zcomm.zero import state as zero_state
from zcomm.zero.elementwise import try_on_parts
from zcomm.zero.gradients import agree, gather_run, global_norm
from zcomm.zero.parameter_gather import Gathers, difference_codec, needs_master
from zcomm.zero.sharded_gradient import ShardedGradient
from zcomm.zero.shards import AroundForward, GradientShards, Shard


class ShardedOptimizer(Optimizer):
    """What zcomm.ZeroOptimizer is, once it has been wired to the hook."""

    def __init__(
        self, optimizer_class: Any, params: Any, param_settings: Settings | None, options: Any
    ) -> None:
        self._optimizer_class = optimizer_class
        self._param_settings = param_settings
        self._arguments = dict(options)
        self._attached = False
        super().__init__(params, _defaults(optimizer_class, options))
        for group in self.param_groups:
            self._try(group)

    @property
    def state_kinds(self) -> list[dict[str, Any]]:
        """What state each group's optimizer keeps, by name, with the options of now."""
        return [self._try(group) for group in self.param_groups]

    def _try(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return try_on_parts(self._optimizer_class, self._arguments, self.options(group))

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: v for key, v in group.items() if key not in ("params", "param_names")}

    def compared(self, names: Mapping[int, str]) -> dict[str, str]:
        """What must be the same on all ranks, as text."""
        groups = [
            {**self.options(g), "params": [names.get(id(p)) for p in g["params"]]}
            for g in self.param_groups
        ]
        codecs = None if self._param_settings is None else self._param_settings.codec
        return {
            "optimizer": self._optimizer_class.__qualname__,
            "param_codec": repr(codecs),
            "param_groups": repr(groups),
        }

    def attach(self, compressor: DdpCompressor, ddp: DistributedDataParallel) -> None:
        """Takes its shards of the parameters; from now on the hook brings the gradients."""
        self.compressor = compressor
        compressor.optimizer = ref(self)
        self.gradients: GradientShards = GradientShards(
            WeakMethod(self._unscale), ddp.gradient_as_bucket_view
        )
        self._by_id = {id(p): name for name, p in compressor.buckets.named.items()}
        self._gathers = Gathers(compressor, self._param_settings)
        self._frozen: list[Tensor] = []
        groups = [self._inner_group(group) for group in self.param_groups]
        self.inner: Optimizer = self._optimizer_class(groups, **self._arguments)
        compressor.buckets.sink = self.gradients
        self._attached = True
        if ddp.gradient_as_bucket_view:
            ddp.register_forward_pre_hook(AroundForward(self.gradients, "hide"))
            ddp.register_forward_hook(AroundForward(self.gradients, "show"), always_call=True)

    def identity(self) -> dict[str, Any]:
        """What a saved state must have in common with this optimizer."""
        buckets = self.compressor.buckets
        return {
            "optimizer": self._optimizer_class.__qualname__,
            "codec": dict(self.compressor.settings.codecs_by_pattern()),
            "param_codec": self._param_settings and self._param_settings.codecs_by_pattern(),
            "parameters": {
                name: [shard.item.numel, str(shard.flat.dtype)]
                for name, shard in self.shards.items()
            },
            "codecs": {name: item.codec.spec for name, item in buckets.items.items()},
            "param_groups": [[s.name for s in shards] for _, shards in self.groups_of_shards()],
            "state": [sorted(kinds) for kinds in self.state_kinds],
            "feedback": {
                name: mode
                for name, item in buckets.items.items()
                if (mode := self.compressor.settings.mode(item.codec))
            },
        }

    def is_coded(self, shard: Shard) -> bool:
        """Whether a parameter is gathered as differences."""
        return difference_codec(self._param_settings, shard) is not None

    def groups_of_shards(self) -> Iterator[tuple[int, list[Shard]]]:
        """The shards of each group's parameters, frozen ones left out."""
        for index, group in enumerate(self.param_groups):
            names = [self._by_id[id(p)] for p in group["params"] if id(p) in self._by_id]
            yield index, [self.shards[name] for name in names]

    @property
    def shards(self) -> Mapping[str, Shard]:
        """This rank's shards, by parameter name."""
        return self.gradients.shards

    def _inner_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        frozen = [p for p in group["params"] if not p.requires_grad]
        shards = [self._shard(p) for p in group["params"] if p.requires_grad]
        self.gradients.add(shards)
        self._frozen += frozen
        return {**self.options(group), "params": [shard.tensor for shard in shards]}

    def _shard(self, p: Tensor) -> Shard:
        name = self._by_id.get(id(p))
        if name is None:
            raise ValueError(
                f"rank {self.compressor.rank}: ZeroOptimizer: expected parameters of the DDP "
                f"model, got another one, {arguments.describe(p)}; give it to an optimizer of its "
                "own"
            )
        item, rank = self.compressor.buckets.items[name], self.compressor.rank
        shard = Shard(name, p, item, rank)
        if needs_master(self._param_settings, shard):
            shard.make_master()
        return shard

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. All ranks must do so; the next step() compares the groups."""
        super().add_param_group(param_group)
        if not self._attached:
            return
        group = self.param_groups.pop()  # nothing stays of a group that is refused
        self._try(group)
        self.inner.add_param_group(self._inner_group(group))
        self.param_groups.append(group)
        self.compressor.buckets.forget()
        self._gathers.forget()

    # A step.

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates this rank's runs and gathers all parameters. All ranks must call it."""
        if closure is not None:
            raise ValueError(
                "step: expected no closure, got one: it would run backward() inside of step(), on "
                "each rank as often as its own loss demands; call backward() before step()"
            )
        self.compressor.raise_failure()
        changed = self._take_changes()
        self._give_gradients()
        groups = list(zip(self.param_groups, self.inner.param_groups))
        for outer, inner in groups:
            inner.update(self.options(outer))
        options = [self.options(outer) for outer, _ in groups]
        self.inner.step()
        for outer, inner in groups:  # some optimizers count in their groups
            outer.update(self.options(inner))
        note = f", with gradients {self._given()} and options {options}{changed}"
        self._gather_parameters(f"step {self.compressor.step}", note)

    def _given(self) -> str:
        """Which parameters have gradients, for all ranks to compare."""
        return "".join("-+"[s.tensor.grad is not None] for s in self.shards.values())

    def _take_changes(self) -> str:
        """Follows parameters that were changed outside of step(); says which, for all to compare.

        Runs without a master are the parameter itself: only other memory needs a look.
        """
        changed = [shard for shard in self.shards.values() if shard.changed()]
        names = []
        for shard in changed:
            if shard.moved():
                self._gathers.forget()
            shard.rebind()
            if shard.has_master:
                shard.read()
                names.append(f"{shard.name} ({_checksum(shard.flat):x})")
            shard.remember()
        return f", after a change of {', '.join(names)}" if names else ""

    def _give_gradients(self) -> None:
        for p in self._frozen:
            if p.grad is not None:
                raise RuntimeError(
                    f"rank {self.compressor.rank}: step: expected no gradient of a parameter that "
                    f"was frozen when the model was wrapped, {arguments.describe(p)}, got one: DDP "
                    "does not reduce it; wrap the model anew and make a new optimizer"
                )
        for shard in self.shards.values():
            grad = shard.parameter.grad
            if grad is None:
                shard.tensor.grad = None
            elif grad is shard.gradient and shard.gradient.local is None:
                shard.tensor.grad = shard.sum
            else:
                raise RuntimeError(
                    f"rank {self.compressor.rank}: step: expected gradients that were reduced, "
                    f"got one of parameter {shard.name!r} that is this rank's alone; run the last "
                    "backward() before step() outside of no_sync(), leave p.grad to zcomm, and add "
                    "param groups after zero_grad()"
                )

    def _gather_parameters(self, what: str, note: str = "", exact: bool = False) -> None:
        shards = self.shards.values()
        with Range("zcomm::gather_parameters"):
            self._gathers.run(shards, what, note, exact)
        increment_version([shard.parameter for shard in shards])
        for shard in shards:
            shard.shared = None
            shard.remember()

    @torch.no_grad()
    def sync_parameters(self) -> None:
        """Gives all ranks the exact parameters, rounded to their dtype only. All must call it.

        With `param_codec` the parameters lag behind the owners' masters by what the codec left
        out; evaluate and export after this. Training goes on from the exact values.
        """
        self.compressor.raise_failure()
        changed = self._take_changes()
        self._gather_parameters("sync_parameters", changed, exact=True)

    @torch.no_grad()
    def reload_parameters(self) -> None:
        """The owners' masters take the parameters' values, on this rank.

        step() notices by itself when a parameter was changed: by load_state_dict(), by an
        operation in place. It cannot see writes to `p.data`, or by code that is not torch's; where
        there are masters (bf16 and fp16 parameters, `param_codec`) call this on all ranks then.
        """
        for shard in self.shards.values():
            shard.rebind()
            if shard.has_master:
                shard.tensor.copy_(shard.run)
            shard.shared = None
            shard.remember()
        self._gathers.forget()

    # Gradients.

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales all gradients so that their norm is at most `max_norm`; returns the norm.

        It is that of all ranks' shards together: what torch.nn.utils.clip_grad_norm_ gives for the
        whole gradient, to rounding. All ranks must call it.
        """
        if norm_type <= 0:
            raise ValueError(f"clip_grad_norm_: expected norm_type > 0, got {norm_type}")
        self.compressor.raise_failure()
        self._give_gradients()
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
        """What GradScaler does to gradients, on shards; all ranks find the same."""
        sums = [g.shard for g in gradients]
        foreach.unscale_(sums, found_inf, inv_scale)
        found_inf.fill_(max(agree(self.compressor, float(found_inf))))

    @torch.no_grad()
    def full_grad(self, p: Tensor) -> Tensor | None:
        """The whole mean gradient of a parameter, gathered from its owners; None if it has none.

        All ranks must call it.
        """
        self.compressor.raise_failure()
        shard = self.shards.get(self._by_id.get(id(p), ""))
        if shard is None:
            raise ValueError(
                f"rank {self.compressor.rank}: full_grad: expected a parameter of this optimizer, "
                f"got another tensor, {arguments.describe(p)}"
            )
        self._give_gradients()
        if p.grad is None:
            return None
        whole = gather_run(self.compressor, shard, shard.sum, "full_grad")
        return whole.to(p.dtype).as_strided(p.shape, p.stride())

    # What is saved.

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, for torch.distributed.checkpoint; see zcomm.save_checkpoint.

        Refers to the optimizer's own memory. An ordinary optimizer's format:
        consolidated_state_dict().
        """
        return zero_state.state_dict(self)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        """Takes a state of state_dict(), or the state of an ordinary torch optimizer.

        All ranks must call it. Ranks that do not have the ordinary one give None, and are sent
        their runs by the first rank that has it.
        """
        if state_dict is None or zero_consolidate.is_ordinary_state(state_dict):
            zero_consolidate.load_ordinary(self, state_dict)
            return
        for shard, run in zero_state.load_state_dict(self, state_dict):
            shard.flat.copy_(gather_run(self.compressor, shard, run, "load_state_dict"))
            shard.remember()

    @torch.no_grad()
    def consolidated_state_dict(self, to: int = 0) -> dict[str, Any] | None:
        """The state in the format of the ordinary torch optimizer, on rank `to`; None elsewhere.

        All ranks must call it. One tensor after another is sent: no other rank holds more than its
        shards.
        """
        return zero_consolidate.consolidate(self, to)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(
            "ZeroOptimizer: expected not to be copied, because it belongs to one DDP model and its "
            "hook; use copy.deepcopy(opt.state_dict())"
        )

    def close(self) -> None:
        """Ends the engine. Neither the optimizer nor its hook can be used afterwards."""
        self.compressor.close()


def _defaults(optimizer_class: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    try_on_parts(optimizer_class, options, {})
    defaults: dict[str, Any] = optimizer_class([torch.zeros(1)], **options).defaults
    return defaults


def _checksum(flat: Tensor) -> int:
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[flat.element_size()]
    return int(flat.view(words).sum(dtype=torch.int64)) & 0xFFFFFFFF
