"""The native core: addresses and sizes in, no torch."""

from collections.abc import Sequence

class Layout:
    def __init__(
        self,
        # codec_id, log2_block, numel, k, offset, frame_index, body_start
        segments: Sequence[tuple[int, int, int, int, int, int, int]],
        # start, nbytes, codec_byte, elements, layout_hash
        frames: Sequence[tuple[int, int, int, int, int]],
    ) -> None: ...

def allocated_nbytes() -> tuple[int, int]:
    """Bytes that the native core holds on the heap now, and the most it ever held."""

def isas() -> list[str]: ...
def built_isas() -> list[str]: ...
def encode(
    layout: Layout,
    isa_index: int,
    threads: int,
    grad_addr: int,
    grad_dtype: int,
    prescale: float,
    residual_in_table_addr: int,
    residual_out_table_addr: int,
    residual_dtype: int,
    wire_addr: int,
    verify: bool,
    keep_idle: bool,
    /,
) -> None: ...
def decode_sum(
    layout: Layout,
    isa_index: int,
    threads: int,
    wire_addrs: Sequence[int],
    out_addr: int,
    verify: bool,
    /,
) -> tuple[int, str] | None: ...
