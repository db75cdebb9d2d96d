"""The only place that launches kernels. To run them in another way, pass another launcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zcomm.kernels.triton.registry import Variant

# A variant, the number of programs, and the values of the variant's arguments.
Launch = Callable[[Variant, int, Sequence[int]], None]


def launch(variant: Variant, programs: int, arguments: Sequence[int]) -> None:
    """On the current device and its current stream; or in the interpreter, on the CPU's memory."""
    options = variant.options_for("cuda" if torch.version.cuda else "other")
    variant.function[(programs,)](*arguments, **variant.constexprs, **options)
