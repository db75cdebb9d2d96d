"""CuPy arrays as arguments: a call on them gives a CuPy array, and runs on CuPy's current stream.

The memory is shared (DLPack), never copied. All arrays of a call are CuPy's or all are torch's:
each library orders its work on a stream of its own. CuPy is never imported here: a caller with one
of its arrays has imported it.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

_LEGACY_STREAM, _PER_THREAD_STREAM = 1, 2  # numbers that CUDA has for streams without a handle


def is_array(value: object) -> bool:
    """Whether it is a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, getattr(cupy, "ndarray", ()))


def has_arrays(values: object) -> bool:
    """Whether it is a CuPy array, or a list that begins with one."""
    return "cupy" in sys.modules and is_array(_first(values))


def _first(values: object) -> Any:
    """The value, or what a list has first."""
    if isinstance(values, (list, tuple)):
        return next((value for value in values if value is not None), None)
    return values


def call(
    function: Callable[..., Tensor], arrays: Mapping[str, object], settings: Mapping[str, object]
) -> Tensor:
    """`function` of tensors that share the arrays' memory; its result as a CuPy array.

    `arrays` are arguments by name; the first one decides the device. What is written to "out" is
    returned as the array that was given. (A Tensor for type checkers: CuPy has no types.)
    """
    with on_stream_of(_first(next(iter(arrays.values())))):
        tensors = {name: shared(value, name) for name, value in arrays.items()}
        result = function(**tensors, **settings)
        out: Any = arrays.get("out")
        found: Tensor = sys.modules["cupy"].from_dlpack(result) if out is None else out
        return found


def shared_residuals(tensors: Any, outputs: Any) -> tuple[Any, Any]:
    """What Residuals is given, as tensors that share the arrays' memory."""
    with on_stream_of(_first(tensors)):
        return shared(tensors, "residuals"), shared(outputs, "outputs")


def shared(value: object, what: str) -> Any:
    """A tensor with the memory of an array; lists of arrays become lists of tensors."""
    if isinstance(value, (list, tuple)):
        return [shared(item, f"{what} {i}") for i, item in enumerate(value)]
    if isinstance(value, Tensor):
        raise TypeError(
            f"{what}: expected a CuPy array like the other arguments, got a tensor; use "
            "cupy.from_dlpack(tensor)"
        )
    if not is_array(value):
        return value
    array: Any = value
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{what}: expected contiguous memory, got a CuPy array with strides {array.strides}; "
            "use cupy.ascontiguousarray(x)"
        )
    try:
        return from_dlpack(array)
    except BufferError as error:
        raise ValueError(
            f"{what}: expected memory that torch can share, got {error}; torch cannot share "
            "managed memory (cupy.cuda.malloc_managed): use CuPy's own pool"
        ) from None


def on_stream_of(array: Any) -> AbstractContextManager[Any]:
    """CuPy's current stream on the array's device is torch's, too, until the end of the block."""
    if torch.version.cuda is None and torch.version.hip is None:
        raise RuntimeError(
            f"expected a torch with CUDA for CuPy arrays, got torch {torch.__version__}; install "
            "its CUDA build, see pytorch.org/get-started"
        )
    ordinal = array.device.id
    with array.device:
        handle = sys.modules["cupy"].cuda.get_current_stream().ptr
    if handle == _PER_THREAD_STREAM:
        raise ValueError(
            "expected CuPy's default stream or one of its own, got the per-thread default stream, "
            "which torch cannot use; unset CUPY_CUDA_PER_THREAD_DEFAULT_STREAM, or use `with "
            "cupy.cuda.Stream():`"
        )
    if handle in (0, _LEGACY_STREAM):
        return torch.cuda.stream(torch.cuda.default_stream(ordinal))
    external = torch.cuda.ExternalStream(handle, device=ordinal)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(external)
