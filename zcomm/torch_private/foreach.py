"""Operations on lists of tensors, as torch.optim and GradScaler use them.

ZERO and UNSCALE are what __torch_dispatch__ gets from zero_grad(set_to_none=False) and from
GradScaler.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from zcomm.torch_private.probe import Corner

_corner = Corner("torch.amp.GradScaler._get_scale_async")
missing = _corner.missing

_Tensors = Sequence[Tensor]
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"

add_: Callable[[_Tensors, _Tensors], None] = _corner.bind("torch._foreach_add_")
copy_: Callable[[_Tensors, _Tensors], None] = _corner.bind("torch._foreach_copy_")
lerp_: Callable[[_Tensors, _Tensors, float], None] = _corner.bind("torch._foreach_lerp_")
mul_: Callable[[_Tensors, float], None] = _corner.bind("torch._foreach_mul_")
norm: Callable[..., list[Tensor]] = _corner.bind("torch._foreach_norm")
sub_: Callable[[_Tensors, _Tensors], None] = _corner.bind("torch._foreach_sub_")
ZERO: Any = _corner.bind("torch.ops.aten._foreach_zero_.default")

# Multiplies gradients by the last argument; sets the second to 1 if one is not finite.
unscale_: Callable[[_Tensors, Tensor, Tensor], None] = _corner.bind(f"torch.{_UNSCALE}")
UNSCALE: Any = _corner.bind(f"torch.ops.aten.{_UNSCALE}.default")


def scale_of(scaler: Any) -> Tensor | None:
    """The scale as a tensor; None before its first use, and if the scaler is not torch's."""
    scale = getattr(scaler, "_get_scale_async", lambda: None)()
    return scale if isinstance(scale, Tensor) else None
