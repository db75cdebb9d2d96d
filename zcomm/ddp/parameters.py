"""The parameters that DDP reduces: their names, and who owns what of them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zcomm.base import arguments
from zcomm.sharding.chunks import Item, block_of
from zcomm.sharding.owners import owner_bounds
from zcomm.sharding.settings import Settings
from zcomm.torch_private import ddp as private
from zcomm.transport.channels import expect_sendable

_IGNORE = f"; or exclude it with {private.IGNORE_CALL}"


def module_of(model: nn.Module) -> nn.Module:
    """The module that DDP wraps; any other as it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def trainable(ddp: nn.Module) -> dict[str, Tensor]:
    """The parameters that DDP reduces, by name; refuses those that zcomm cannot send.

    In a world of one process the model may be unwrapped.
    """
    named = {name: p for name, p in _not_ignored(ddp).items() if p.requires_grad}
    if isinstance(ddp, DistributedDataParallel):
        _expect_all_reduced(ddp, named)
    for name, p in named.items():
        expect_sendable(p, f"parameter {name!r}", _IGNORE)
        arguments.address(p, f"parameter {name!r}")
    device_of(named)
    for prefix, module in module_of(ddp).named_modules():
        name = private.uncompiled_name(f"{prefix}.weight".lstrip("."))
        if getattr(module, "sparse", False) is True and name in named:
            raise ValueError(
                f"parameter {name!r}: expected dense gradients, got a "
                f"{type(module).__name__}(sparse=True); use sparse=False{_IGNORE}"
            )
    return named


def frozen(ddp: nn.Module) -> dict[str, Tensor]:
    """The parameters that DDP would reduce if they were trained, by name."""
    return {name: p for name, p in _not_ignored(ddp).items() if not p.requires_grad}


def _not_ignored(ddp: nn.Module) -> dict[str, Tensor]:
    ignored = private.ignored_names(ddp) if isinstance(ddp, DistributedDataParallel) else ()
    # torch.compile's wrapper adds to the names; patterns and saved states should not see it.
    return {
        private.uncompiled_name(name): p
        for name, p in module_of(ddp).named_parameters()
        if name not in ignored
    }


def _expect_all_reduced(ddp: DistributedDataParallel, named: Mapping[str, Tensor]) -> None:
    """Refuses a model of which DDP reduces parameters that it does not name any more."""
    known = {id(p) for p in named.values()}
    reduced = [p for p in private.reduced_parameters(ddp) if p.requires_grad]
    missing = sum(id(p) not in known for p in reduced)
    if missing:
        raise ValueError(
            f"expected a model that has all parameters that DDP reduces, got one without {missing} "
            f"of {len(reduced)}: over one dimension of a mesh, torch removes tensor-parallel "
            "parameters from the model in its first forward pass; call zcomm.compress or create "
            "the ZeroOptimizer before that"
        )


def device_of(named: Mapping[str, Tensor]) -> torch.device:
    """The device of all parameters; refuses several."""
    first, *others = named.items() if named else [("", torch.empty(0, device="cpu"))]
    for name, p in others:
        if p.device != first[1].device:
            raise ValueError(
                f"parameter {name!r}: expected device {first[1].device}, that of {first[0]!r}, got "
                f"{p.device}; a model must be on one device: move it with .to()"
            )
    return first[1].device


def items_of(named: Mapping[str, Tensor], settings: Settings, world_size: int) -> dict[str, Item]:
    """An item for each parameter; its owners do not depend on buckets."""
    codecs = {name: settings.codec_of(name, p.numel()) for name, p in named.items()}
    sizes = [(p.numel(), block_of(codecs[name])) for name, p in named.items()]
    bounds = owner_bounds(sizes, world_size)
    return {
        name: Item(name, codecs[name], p.numel(), 0, cuts)
        for (name, p), cuts in zip(named.items(), bounds)
    }
