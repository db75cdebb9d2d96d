"""The CUDA kernels: addresses, sizes and a stream in, no torch."""

from collections.abc import Sequence

from zcomm.kernels.native import SegmentRow

INLINE_WIRES: int
ARCHS: list[int]  # machine code for each of them, PTX for the last

class Plan:
    def __init__(
        self,
        segments: Sequence[SegmentRow],
        # start, nbytes, codec_byte, elements, layout_hash
        frames: Sequence[tuple[int, int, int, int, int]],
    ) -> None: ...
    @property
    def tables(self) -> bytes:
        """What is uploaded to the device."""

    def encode_scratch_nbytes(self) -> int: ...
    def decode_scratch_nbytes(self, wires: int) -> int: ...
    def kernels(self) -> list[int]: ...

def missing() -> str:
    """Why nothing can be launched here; "" if it can."""

def capability(ordinal: int, /) -> tuple[int, int]:
    """A device's compute capability."""

def encode(
    plan: Plan,
    tables_addr: int,
    scratch_addr: int,
    grad_addr: int,
    grad_dtype: int,
    prescale: float,
    residual_in_table_addr: int,
    residual_out_table_addr: int,
    residual_dtype: int,
    wire_addr: int,
    verify: bool,
    keep_idle: bool,
    stream: int,
    /,
) -> None: ...
def decode_sum(
    plan: Plan,
    tables_addr: int,
    scratch_addr: int,
    wire_addrs: Sequence[int],
    wire_table_addr: int,
    out_addr: int,
    verify: bool,
    fault_addr: int,
    stream: int,
    /,
) -> None: ...
