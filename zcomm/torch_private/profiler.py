"""Ranges of torch.profiler, for 1 us each; torch's public record_function takes 20, always."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from zcomm.torch_private.probe import Corner

_corner = Corner()
missing = _corner.missing

_Ranges = Callable[[str], AbstractContextManager[None]]
Range: _Ranges = _corner.bind("torch._C._profiler._RecordFunctionFast")
