"""Coder: one layout encoded or decoded, and refused wires traced to the rank that sent them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from zcomm.codecs.scattered import ScatteredLayout
from zcomm.engine.buffers import Frames
from zcomm.engine.faults import Faults
from zcomm.engine.transit import Transit
from zcomm.sharding.chunks import Chunk
from zcomm.sharding.residual_store import Hop
from zcomm.wire.header import WireError

Sender = Callable[[WireError], int | None]


class Coder:
    """The codec calls of one rank.

    With `faults`, decoders leave what they find there; without, a refused wire raises at once.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], threads: int | None, faults: Faults | None
    ) -> None:
        self._rank, self._ranks = ranks[rank], ranks  # global ones, for messages
        self._threads, self._faults = threads, faults

    def encode(
        self,
        transit: Transit,
        layout: Any,
        source: Tensor,
        out: Tensor,
        hop: Hop | None,
        prescale: float = 1.0,
    ) -> None:
        layout.encode(
            source,
            hop.residuals if hop else None,
            out=out,
            prescale=prescale,
            verify=transit.verify,
            keep_idle=True,
            threads=self._threads,
        )
        if hop:
            hop.average()

    def encode_scattered(self, transit: Transit, layout: ScatteredLayout, out: Tensor) -> None:
        layout.encode(out, verify=transit.verify, threads=self._threads)

    def decode_sum(self, transit: Transit, frames: Frames, layout: Any, out: Tensor) -> Tensor:
        """The sum of this rank's frame from every rank."""

        def sender(error: WireError) -> int | None:
            return None if error.wire_index is None else frames.chunk.sources[error.wire_index]

        with self._refusals(transit, layout, sender) as faults:
            layout.decode_sum(
                frames.received(),
                out=out,
                verify=transit.verify,
                threads=self._threads,
                faults=faults,
            )
        return out

    def encode_sum_of(self, transit: Transit, layout: Any, wires: list[Tensor]) -> Tensor:
        """The frame of the sum of one owner's frames, from all ranks in order."""
        how = {"verify": transit.verify, "threads": self._threads}
        ranks = sorted(transit.chunk.senders)
        with self._refusals(transit, layout, lambda e: ranks[e.wire_index or 0]):
            sums = layout.decode_sum(wires, **how)
        frame: Tensor = layout.encode(sums, **how)
        return frame

    def decode(self, transit: Transit, layout: Any, out: Tensor) -> Tensor:
        """The frames of all owners."""
        wire = transit.whole.gathered(own=True)
        how = {"out": out, "verify": transit.verify, "threads": self._threads}
        with self._refusals(transit, layout, owner_of(transit.chunk, layout)) as faults:
            if isinstance(wire, Tensor):
                layout.decode(wire, faults=faults, **how)
            else:
                layout.decode_frames(wire, **how)
        return out

    def decode_scattered(self, transit: Transit, scattered: ScatteredLayout) -> None:
        """The frames of all owners but this rank."""
        layout, wire = scattered.layout, transit.whole.gathered(own=False)
        with self._refusals(transit, layout, owner_of(transit.chunk, layout)) as faults:
            if isinstance(wire, Tensor):
                scattered.decode(wire, verify=transit.verify, threads=self._threads, faults=faults)
            else:
                scattered.decode_frames(wire, verify=transit.verify, threads=self._threads)

    def refused(self, place: object, error: WireError, sent_by: int | None) -> WireError:
        """What users see of a refused wire."""
        rank = None if sent_by is None else self._ranks[sent_by]
        text = f"rank {self._rank}: {place}: corrupted wire from rank {rank}: {error}"
        return WireError(text, rank)

    @contextmanager
    def _refusals(self, transit: Transit, layout: Any, sender: Sender) -> Iterator[Tensor | None]:
        """Names the sender in a WireError, raised here or, on a device, found out later."""
        place = transit if self._faults is None else str(transit)  # its hop changes later

        def refused(error: WireError) -> WireError:
            return self.refused(place, error, sender(error))

        try:
            yield None if self._faults is None else self._faults.take(layout, refused)
        except WireError as error:
            raise refused(error) from error


def owner_of(chunk: Chunk, layout: Any) -> Sender:
    """Whose frame, or segment, an error names."""

    def owner(error: WireError) -> int | None:
        frame = error.frame
        if error.segment is not None:
            frame = int(layout.segments[error.segment].peer)
        return None if frame is None else chunk.senders[frame]

    return owner
