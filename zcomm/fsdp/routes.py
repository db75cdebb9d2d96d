"""Routes: how the parameters of an FSDP module travel.

Codecs and residuals belong to parameters; a route is what follows from them for the parameters that
FSDP hands over together.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from zcomm.codecs import Codec
from zcomm.fsdp.modules import ShardedModule, ShardedParameter
from zcomm.sharding.chunks import Chunks, ChunkSize, Item, make_chunks
from zcomm.sharding.hierarchy import Hosts
from zcomm.sharding.residual_store import BoundFeedback, Mode, ResidualStore
from zcomm.sharding.settings import EXACT, PLAIN, Settings


class ModuleRoute(NamedTuple):
    """How some parameters of a module travel, and their residuals."""

    chunks: Chunks
    feedback: BoundFeedback | None
    text: str


class ModuleRoutes:
    """The routes of one model's modules, made when they are first needed."""

    def __init__(
        self,
        modules: Sequence[ShardedModule],
        settings: Settings,
        param_settings: Settings | None,
        feedback: ResidualStore,
        chunk_size: Callable[[ShardedModule], ChunkSize],
        hosts: Callable[[ShardedModule], Hosts | None],
    ) -> None:
        self.modules, self.settings, self.param_settings = modules, settings, param_settings
        self.feedback = feedback
        self._chunk_size, self._hosts = chunk_size, hosts
        self._made: dict[tuple[object, ...], ModuleRoute] = {}

    def use(self, settings: Settings) -> None:
        """Other codecs, from the next collective on."""
        self.settings = settings
        self._made.clear()

    def reduce(
        self, module: ShardedModule, used: Sequence[ShardedParameter], dtype: torch.dtype, step: int
    ) -> ModuleRoute:
        """For the gradients of some parameters."""
        plain = step < self.settings.start_step or dtype is torch.float64
        key = (module.name, "reduce", dtype, plain, *(p.name for p in used))
        if key not in self._made:
            codecs = [PLAIN if plain else self.codec(p) for p in used]
            self._made[key] = self._make(module, used, codecs, dtype, fed_back=not plain)
        return self._made[key]

    def gather(self, module: ShardedModule, dtype: torch.dtype) -> ModuleRoute:
        """For all parameters, gathered in this dtype."""
        key = module.name, "gather", dtype
        if key not in self._made:
            exact = EXACT[dtype]
            coded = dtype is not torch.float64
            codecs = [(coded and self.param_codec(p)) or exact for p in module.parameters]
            self._made[key] = self._make(module, module.parameters, codecs, dtype, fed_back=False)
        return self._made[key]

    def _make(
        self,
        module: ShardedModule,
        parameters: Sequence[ShardedParameter],
        codecs: Sequence[Codec],
        dtype: torch.dtype,
        fed_back: bool,
    ) -> ModuleRoute:
        items = module.items(parameters, codecs)
        size = self._chunk_size(module)
        raw = dtype is torch.float64
        two_hops = self.settings.two_hops(self._hosts(module))
        chunks = make_chunks(items, module.rank, module.world_size, size, raw, two_hops)
        bound = None
        if fed_back and any(self.settings.mode(used) for used in codecs):
            bound = self.feedback.bind(chunks, module.rank, self._mode, gather=False)[0]
        named = ", ".join(f"{p.name} as {used.spec}" for p, used in zip(parameters, codecs))
        return ModuleRoute(chunks, bound, f"{dtype} {named}")

    def _mode(self, item: Item) -> Mode:
        """How an item is fed back; padding is not."""
        return self.settings.mode(item.codec) if item.key else False

    def codec(self, p: ShardedParameter) -> Codec:
        """The codec of its gradient."""
        return self.settings.codec_of(p.name, p.numel)

    def param_codec(self, p: ShardedParameter) -> Codec | None:
        """What a parameter is gathered with; None: exactly."""
        settings = self.param_settings
        return None if settings is None else settings.lossy_codec_of(p.name, p.numel)

    def hold_all(self) -> None:
        """Makes all residuals: what they take is known before training."""
        for module, p in self.fed_back():
            items = module.items([p], [self.codec(p)])
            hosts = self._hosts(module)
            owners = range(module.world_size) if hosts is None else hosts.owners
            self.feedback.hold(filter(self._mode, items), module.rank, False, owners)

    def fed_back(self) -> list[tuple[ShardedModule, ShardedParameter]]:
        """The parameters that have residuals."""
        return [
            (module, p)
            for module in self.modules
            for p in module.parameters
            if p.trainable and self.settings.mode(self.codec(p)) is not False
        ]

    def specs(self, p: ShardedParameter) -> tuple[str, str]:
        """What its gradient is sent with (perhaps "auto"), and what it is gathered with."""
        gathered, sent = self.param_codec(p), self.settings.spec_of(p.name, p.numel)
        return sent, "exactly" if gathered is None else gathered.spec
