"""Checks of arguments. Every message says what was expected, what it got, and a remedy.

TypeError for the wrong kind of object, ValueError for a tensor or number of the wrong form. The
common case of each check is a comparison or two: these run on every call.
"""

import ctypes
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeGuard

import torch
from torch import Tensor

from zcomm.base import cupy_arrays

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SENT_DTYPES = (*GRADIENT_DTYPES, torch.float64)  # fp64 goes uncompressed
RESIDUAL_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
OUTPUT_DTYPES = (torch.float32,)
_DTYPE_NAMES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int8": torch.int8,
}
_BYTES = (torch.uint8,)
_DENSE = torch.strided
_FROM_BYTES = "; use torch.frombuffer(bytearray(data), dtype=torch.uint8)"
_MAX_COUNT = 2**63 - 1
MAX_THREADS = 1024  # more than almost any machine has cores


def describe(value: object) -> str:
    """A few words about an argument: a number itself, a tensor's shape, else its type."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if cupy_arrays.is_array(value):
        return "a CuPy array"
    if value is None or isinstance(value, (bool, int, float, str, torch.Size)):
        return repr(value)
    return type(value).__name__


def dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    """ "torch.float32, torch.bfloat16 or torch.int8"."""
    *others, last = map(str, dtypes)
    return f"{', '.join(others)} or {last}" if others else last


def first_difference(expected: object, got: object) -> tuple[str, str]:
    """Two values as text; of two dicts only the first entry that differs."""
    if not isinstance(expected, Mapping) or not isinstance(got, Mapping):
        return repr(expected), repr(got)
    name = next(k for k in sorted({*expected, *got}) if expected.get(k) != got.get(k))
    return f"{name!r}: {expected.get(name)!r}", f"{got.get(name)!r}"


def dtype_of(value: object, what: str) -> torch.dtype:
    """A torch.dtype, from itself or a short name."""
    found = _DTYPE_NAMES.get(value) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype):
        names = ", ".join(map(repr, _DTYPE_NAMES))
        raise ValueError(f"{what}: expected a torch.dtype or {names}, got {describe(value)}")
    return found


def count(value: object, what: str, *, least: int = 0, remedy: str = "") -> int:
    """`value` as an int of at least `least`; floats and bools are refused, not converted."""
    if type(value) is not int:
        value = _index(value, what, remedy)
    if not least <= value <= _MAX_COUNT:
        bound = f">= {least}" if value < least else "< 2^63"
        raise ValueError(f"expected {what} {bound}, got {value}")
    return value


def _index(value: object, what: str, remedy: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"expected {what} as an int, got {describe(value)}{remedy}") from None


def thread_count(threads: object) -> int | None:
    """None (torch's own count), or an int from 1 to 1024."""
    if threads is None:
        return None
    number = count(threads, "threads", least=1)
    if number > MAX_THREADS:
        raise ValueError(
            f"expected threads <= {MAX_THREADS}, got {number}: each is a thread of this process, "
            "and more than there are idle cores make a codec slower; use None for torch's number"
        )
    return number


def fp32_factor(prescale: object) -> float:
    """`prescale` as a float that is finite when rounded to fp32."""
    if not isinstance(prescale, numbers.Real) or isinstance(prescale, bool):
        raise TypeError(f"expected prescale as a float, got {describe(prescale)}")
    factor = float(prescale)
    if not math.isfinite(ctypes.c_float(factor).value):
        raise ValueError(f"expected a prescale that is finite in fp32, got {prescale}")
    return factor


def expect_tensor(t: object, what: str, remedy: str = "") -> None:
    """Refuses anything but a dense tensor."""
    if not isinstance(t, Tensor):
        if cupy_arrays.is_array(t):
            remedy = "; the other arguments are tensors: use torch.from_dlpack(array)"
        raise TypeError(f"{what}: expected a tensor, got {describe(t)}{remedy}")
    if t.layout is not _DENSE:
        raise ValueError(
            f"{what}: expected a dense tensor, got {t.layout}; sparse gradients are not "
            "supported, use .to_dense()"
        )


def flat(t: Tensor, what: str, remedy: str) -> Tensor:
    """`t` as a 1-D view, without a copy."""
    if isinstance(t, Tensor) and t.dim() == 1:
        return t
    expect_tensor(t, what)
    if not t.is_contiguous():
        raise ValueError(f"{what}: expected contiguous memory, got strides {t.stride()}; {remedy}")
    return (t.detach() if t.requires_grad else t).view(-1)


def is_flat(t: object, dtypes: Sequence[torch.dtype]) -> TypeGuard[Tensor]:
    """Whether `t` is a dense, contiguous 1-D tensor of one of these dtypes."""
    return (
        isinstance(t, Tensor)
        and t.dtype in dtypes
        and t.layout is _DENSE
        and t.dim() == 1
        and t.is_contiguous()
    )


def flat_address(t: Tensor, numel: int, what: str, dtypes: Sequence[torch.dtype]) -> int:
    """Where a flat tensor of at least `numel` elements lies; refuses any other."""
    if not is_flat(t, dtypes):
        _refuse_form(t, what, dtypes)
    if t.numel() < numel:
        raise ValueError(f"{what}: expected {numel} elements, got {t.numel()}")
    return address(t, what)


def bytes_address(t: Tensor, what: str, index: int | str = "") -> int:
    """Where a flat tensor of bytes lies; refuses any other."""
    if not is_flat(t, _BYTES):
        _refuse_form(t, f"{what}{index}", _BYTES)
    return t.data_ptr() or address(t, f"{what}{index}")


def _refuse_form(t: Tensor, what: str, dtypes: Sequence[torch.dtype]) -> NoReturn:
    expect_tensor(t, what, _FROM_BYTES if dtypes is _BYTES else "")
    if t.dtype not in dtypes:
        remedy = "; use x.float()" if dtypes is GRADIENT_DTYPES else ""
        if t.is_complex():
            remedy = "; complex tensors are not supported"
        raise ValueError(f"{what}: expected {dtype_names(dtypes)}, got {t.dtype}{remedy}")
    # A copy would do for an input, but not for what is to be overwritten.
    remedy = "make it with torch.empty(n)" if what == "out" else "use .contiguous().view(-1)"
    raise ValueError(
        f"{what}: expected a contiguous 1-D tensor, got shape {tuple(t.shape)} "
        f"with strides {t.stride()}; {remedy}"
    )


def address(t: Tensor, what: str) -> int:
    """t.data_ptr(); refuses a tensor that has elements but no memory (meta, a wrapper)."""
    start = t.data_ptr()
    if not start and t.numel():
        remedy = "; use .to_local()" if hasattr(t, "to_local") else ""
        raise ValueError(
            f"{what}: expected a tensor that holds data, got {type(t).__name__} on {t.device} "
            f"without memory of its own{remedy}"
        )
    return start


def expect_device(what: str, expected: torch.device, t: Tensor) -> None:
    if t.device != expected:
        raise ValueError(f"{what}: expected device {expected}, got {t.device}; move it with .to()")


def expect_fault_number(faults: Tensor, device: torch.device) -> None:
    """Refuses what kernels could not leave a fault in."""
    flat_address(faults, 1, "faults", (torch.int64,))
    expect_device("faults", device, faults)
    if faults.numel() > 1:
        raise ValueError(f"faults: expected 1 element, got {faults.numel()}; use faults[i : i + 1]")


def overlap(one: str, other: str) -> ValueError:
    return ValueError(
        f"expected {one} and {other} in separate memory, got an overlap; use a clone of one of them"
    )
