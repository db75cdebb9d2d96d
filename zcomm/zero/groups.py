"""ShardedGroups: the param groups of a ZeroOptimizer, and the torch optimizer of their shards."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zcomm.base import arguments
from zcomm.codecs import codec
from zcomm.ddp.compressor import DdpCompressor
from zcomm.engine.tuning.choice import Choice
from zcomm.sharding.settings import Settings
from zcomm.zero.elementwise import OptimizerSpec, options_of
from zcomm.zero.parameter_gather import difference_codec, needs_master
from zcomm.zero.shards import GradientShards, Shard

ParamGroups = list[dict[str, Any]]


def compared(
    spec: OptimizerSpec,
    param_settings: Settings | None,
    groups: ParamGroups,
    named: Mapping[str, Tensor],
) -> dict[str, str]:
    """What must be the same on all ranks, as text."""
    names = {id(p): name for name, p in named.items()}
    described = [
        {**options_of(g), "params": [names.get(id(p)) for p in g["params"]]} for g in groups
    ]
    return {
        "optimizer": spec.optimizer_class.__qualname__,
        "param_codec": repr(None if param_settings is None else param_settings.codec),
        "param_groups": repr(described),
    }


class ShardedGroups:
    """`groups` is the optimizer's own list; `inner` updates this rank's shard of each parameter."""

    def __init__(
        self,
        groups: ParamGroups,
        spec: OptimizerSpec,
        compressor: DdpCompressor,
        param_settings: Settings | None,
        gradients: GradientShards,
    ) -> None:
        self.groups, self.compressor, self.gradients = groups, compressor, gradients
        self.shards: Mapping[str, Shard] = gradients.shards
        self.spec, self._param_settings = spec, param_settings
        self._names = {id(p): name for name, p in compressor.buckets.named.items()}
        self._frozen: list[Tensor] = []
        self.inner: Optimizer = spec.make([self._inner_group(group) for group in groups])

    def add(self, group: dict[str, Any]) -> None:
        self.spec.state_kinds(group)
        self.inner.add_param_group(self._inner_group(group))
        self.groups.append(group)
        self.compressor.buckets.forget()

    def _inner_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        shards = [self._shard(p) for p in group["params"] if p.requires_grad]
        self.gradients.add(shards)
        self._frozen += [p for p in group["params"] if not p.requires_grad]
        return {**options_of(group), "params": [shard.tensor for shard in shards]}

    def _shard(self, p: Tensor) -> Shard:
        name, rank = self._names.get(id(p)), self.compressor.rank
        if name is None:
            raise ValueError(
                f"rank {rank}: ZeroOptimizer: expected parameters of the DDP model, got another "
                f"one, {arguments.describe(p)}; give it to an optimizer of its own"
            )
        shard = Shard(name, p, self.compressor.buckets.items[name], rank)
        if needs_master(self._param_settings, shard):
            shard.make_master()
        return shard

    def shard_of(self, p: Tensor) -> Shard | None:
        return self.shards.get(self._names.get(id(p), ""))

    def numbered(self) -> Iterator[tuple[int, Shard, dict[str, Any]]]:
        """Each trained parameter's number in torch's state dicts, its shard, and its state's kinds.

        Frozen parameters have a number, too, but no shard.
        """
        index = 0
        for group in self.groups:
            kinds = self.spec.state_kinds(group)
            for p in group["params"]:
                shard = self.shard_of(p)
                if shard is not None:
                    yield index, shard, kinds
                index += 1

    def state_of(self, shard: Shard) -> dict[str, Any]:
        """The state of a shard; if it has none yet, the initial one."""
        held: dict[str, Any] | None = self.inner.state.get(shard.tensor)
        if held:
            return held
        return self.spec.initial_state(shard.tensor, self._group_of(shard))

    def _group_of(self, shard: Shard) -> Mapping[str, Any]:
        return next(g for g in self.groups if any(p is shard.parameter for p in g["params"]))

    def names(self) -> list[list[str]]:
        """The names of each group's trained parameters."""
        return [
            [self._names[id(p)] for p in group["params"] if id(p) in self._names]
            for group in self.groups
        ]

    def is_coded(self, shard: Shard) -> bool:
        """Whether a parameter is gathered as differences."""
        return difference_codec(self._param_settings, shard) is not None

    def identity(self, choice: Choice | None = None) -> dict[str, Any]:
        """What a saved state must have in common with this optimizer, once it has taken a choice
        of codec="auto"."""
        settings, specs = self.compressor.settings_with(choice), self.compressor.specs_with(choice)
        return {
            "optimizer": self.spec.optimizer_class.__qualname__,
            "codec": dict(settings.codecs_by_pattern()),
            "param_codec": self._param_settings and self._param_settings.codecs_by_pattern(),
            "parameters": {
                name: [shard.item.numel, str(shard.flat.dtype)]
                for name, shard in self.shards.items()
            },
            "codecs": specs,
            "param_groups": self.names(),
            "state": [sorted(self.spec.state_kinds(group)) for group in self.groups],
            "feedback": {
                name: mode for name, spec in specs.items() if (mode := settings.mode(codec(spec)))
            },
        }

    # A step.

    def set_gradients(self) -> None:
        """Gives the inner optimizer this rank's sums; refuses gradients that were not reduced."""
        for p in self._frozen:
            if p.grad is not None:
                raise RuntimeError(
                    f"rank {self.compressor.rank}: step: expected no gradient of a parameter that "
                    f"was frozen when the model was wrapped, {arguments.describe(p)}, got one: DDP "
                    "does not reduce it; wrap the model again and make a new optimizer"
                )
        for shard in self.shards.values():
            shard.tensor.grad = self.gradients.reduced(shard, self.compressor.rank)

    def step(self) -> str:
        """Updates this rank's shards; says with what, for all ranks to compare."""
        groups = list(zip(self.groups, self.inner.param_groups))
        for outer, inner in groups:
            inner.update(options_of(outer))
        options = [options_of(outer) for outer, _ in groups]
        self.inner.step()
        for outer, inner in groups:  # some optimizers keep counts in their groups
            outer.update(options_of(inner))
        given = "".join("-+"[s.tensor.grad is not None] for s in self.shards.values())
        return f", with gradients {given} and options {options}"
