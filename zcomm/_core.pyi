"""The native core: addresses and sizes in, no torch."""

from collections.abc import Sequence

from zcomm.kernels.base import SegmentRow
from zcomm.wire.header import Frame

# the wire, the message, and the frame or segment at fault
Refused = tuple[int, str, int | None, int | None]
# A refused wire, and the owner whose frames were summed then.
Refusal = tuple[Refused, int | None]

class Layout:
    def __init__(self, segments: Sequence[SegmentRow], frames: Sequence[Frame]) -> None: ...

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
    isa: int,
    threads: int,
    wires: Sequence[int],
    out: int,
    verify: bool,
    apart: bool,
    /,
) -> Refused | None: ...

# What the ranks of a host share; see zcomm/transport/shared_memory/ring.py.

CONTROL_NBYTES: int
# state, rank, counter, got, least, most
Seen = tuple[int, int, int, int, int, int]
Place = tuple[int, int]  # an address, and the number of a dtype
# what was seen, step, chunk, chunks, an exchange that has begun, and the seconds of each step
End = tuple[Seen | None, int, int, int, int | None, float, float, float]

class Strips:
    def __init__(self, strips: Sequence[Sequence[tuple[int, int]]]) -> None: ...

class Call:
    def __init__(
        self,
        reduce: bool,
        gather: bool,
        signature: int,
        timeout_s: float,
        spins: int,
        brief: bool,
        begun: int | None,
        /,
    ) -> None: ...

class CodedChunks:
    def __init__(self, rank: int, world: int, layouts: list[tuple[Layout, Layout]], /) -> None: ...

class OwnedParts:
    def __init__(self, parts: list[tuple[Layout, int]], /) -> None: ...

class ResidualTables:
    """For each chunk the tables' addresses, before and after, and the number of a dtype."""

    def __init__(self, tables: Sequence[tuple[int, int, int]], /) -> None: ...

class CodedJob:
    """Points to the memory at its addresses: keep that."""

    def __init__(
        self,
        call: Call,
        isa: int,
        threads: int,
        prescale: float,
        verify: bool,
        chunks: CodedChunks,
        owned: OwnedParts,
        source: Place,
        target: Place,
        own_at: Place,
        sums_addr: int,
        small: OwnedParts | None,
        frames_addr: int,
        sent: ResidualTables | None,
        summed: ResidualTables | None,
        /,
    ) -> None: ...

class Parcels:
    def __init__(self, rank: int, world: int, addr: int, nbytes: int, /) -> None: ...
    def put(self, job: CodedJob, /) -> None: ...
    def take(self, job: CodedJob, /) -> Refusal | None: ...

class Ring:
    def __init__(
        self, rank: int, ranks: Sequence[tuple[int, int]], slots: int, slot_nbytes: int
    ) -> None: ...
    def take(self) -> int: ...
    def slot(self, rank: int, chunk: int, /) -> int: ...
    def wait(self, counter: int, chunk: int, timeout_s: float, spins: int, /) -> Seen | None: ...
    def wait_free(self, timeout_s: float, spins: int, /) -> Seen | None: ...
    def publish(self, chunk: int, signature: int, /) -> None: ...
    def done(self, counter: int, chunk: int, /) -> None: ...
    def give_up(self) -> None: ...
    def interrupt(self) -> None: ...
    def run_plain(
        self,
        call: Call,
        isa: int,
        codec: int,
        prescale: float,
        strips: Strips,
        source: Place,
        target: Place,
        own: Strips,
        own_at: Place,
        accumulate: bool,
        /,
    ) -> End: ...
    def run_coded(self, job: CodedJob, /) -> tuple[End, Refusal | None]: ...

# CUDA kernels that were loaded at run time; what is launched for a layout, and how.

INLINE_WIRES: int
# symbol, the stem of its file, rows in a block (0: a file without blocks)
KERNELS: tuple[tuple[str, str, int], ...]

class Plan:
    def __init__(self, segments: Sequence[SegmentRow], frames: Sequence[Frame]) -> None: ...
    @property
    def tables(self) -> bytes:
        """What is uploaded to the device."""

    def encode_scratch_nbytes(self) -> int: ...
    def decode_scratch_nbytes(self, wires: int) -> int: ...
    def kernels(self) -> list[int]:
        """All that its calls may launch, as numbers of KERNELS."""

class Device:
    def encode(
        self,
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
        self,
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

class Driver(Device):
    """Launches through CUDA's driver, by the addresses of its functions."""

    def __init__(
        self, launch_addr: int, error_name_addr: int, set_context_addr: int, context: int, /
    ) -> None: ...
    def set_function(self, kernel: int, function: int, /) -> None: ...
    def has(self, kernel: int, /) -> bool: ...
