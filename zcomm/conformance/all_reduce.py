"""The compressed all-reduce, to be read and run: no engine, no overlap, nothing hidden.

Each rank owns a run of the tensor. Its pieces are encoded for their owners, summed there in rank
order, and the mean is encoded once more for everyone. Every rank, the owner too, decodes the same
bytes. The tests compare the engine with these two functions bit for bit, for every codec.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm.codecs import Codec
from zcomm.codecs.layout import Layout, Segment
from zcomm.sharding.chunks import block_of, piece_limit
from zcomm.sharding.hierarchy import Hosts
from zcomm.sharding.owners import cut, owner_bounds


class FlatResiduals(NamedTuple):
    """What earlier calls left out, as flat fp32 tensors: of what this rank sends and owns."""

    sent: Tensor
    owned: Tensor


def all_reduce(x: Tensor, codec: Codec, residuals: FlatResiduals | None = None) -> None:
    """Overwrites `x`, a flat fp32 tensor, with the mean over all ranks."""
    sent, owned = residuals or (None, None)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = Layout([Segment(codec, b - a, a, owner) for owner, a, b in _pieces(x, codec)], ranks)
    wire = layout.encode(x, sent, prescale=1 / ranks, keep_idle=True)
    mean = _sum_of_owned(layout, wire, rank)
    frame = layout.for_peer(rank).encode(mean, owned, keep_idle=True)
    layout.decode(_all_gather(frame, layout.frame_nbytes), out=x)


def all_reduce_two_hops(
    x: Tensor,
    local_codec: Codec,
    codec: Codec,
    hosts: Hosts,
    groups: tuple[Any, Any],
    residuals: FlatResiduals | None = None,
) -> None:
    """The same, summed inside each host first. `groups` are this host's ranks, and its column's."""
    (local, across), (sent, owned) = groups, residuals or (None, None)
    rank, ranks, here = dist.get_rank(), dist.get_world_size(), sorted(hosts.neighbours)
    pieces = [(owner, hosts.deputy(owner, hosts.host), a, b) for owner, a, b in _pieces(x, codec)]
    if hosts.is_alone:
        sums = x / ranks
    else:
        first = Layout([Segment(local_codec, b - a, a, here.index(d)) for _, d, a, b in pieces])
        wire = first.encode(x, prescale=1 / ranks, keep_idle=True)
        sums = _sum_of_owned(first, wire, here.index(rank), local)

    # A layout for each rank of this host: a frame for each owner whose deputy it is.
    owners = {n: sorted(hosts.deputy_for(n)) for n in here}
    columns = [
        Layout(
            [Segment(codec, b - a, a, owners[n].index(o)) for o, d, a, b in pieces if d == n],
            len(owners[n]),
        )
        for n in here
    ]
    mine = columns[here.index(rank)]
    starts = accumulate((s.numel for s in mine.segments), initial=0)  # where they lie in the sums
    second = Layout(
        [Segment(codec, s.numel, at, s.peer) for s, at in zip(mine.segments, starts)], mine.peers
    )
    own = owners[rank].index(rank)
    wire = second.encode(sums, sent, keep_idle=True)
    to, sources = dict(zip(owners[rank], second.frame_nbytes)), sorted(hosts.sources)
    sending = [to.get(r, 0) for r in sorted(hosts.column)]
    back = [to[rank] if r in sources else 0 for r in sorted(hosts.column)]
    received = _all_to_all(wire, sending, back, across).view(len(sources), -1)
    mean = second.for_peer(own).decode_sum(received)
    frame = second.for_peer(own).encode(mean, owned, keep_idle=True)

    frames = _all_to_all(frame.repeat(len(sources)), back, sending, across)
    sizes = tuple(layout.wire_nbytes for layout in columns)
    wires = torch.split(_all_gather(frames, sizes, local), list(sizes))
    for layout, part in zip(columns, wires):
        layout.decode(part, out=x)


def _pieces(x: Tensor, codec: Codec) -> list[tuple[int, int, int]]:
    """Owner, start and end of each piece. Codecs that select do so within a piece."""
    ranks = dist.get_world_size()
    (bounds,) = owner_bounds([(x.numel(), block_of(codec))], ranks)
    limit = piece_limit(codec, ranks)
    runs = [cut(bounds[r], bounds[r + 1], limit) for r in range(ranks)]
    return [(owner, a, b) for owner, run in enumerate(runs) for a, b in run]


def _sum_of_owned(layout: Layout, wire: Tensor, own: int, group: Any = None) -> Tensor:
    """All-to-all: each peer gets its frame from every rank, and sums them in rank order."""
    nbytes, ranks = layout.frame_nbytes[own], layout.peers
    received = _all_to_all(wire, layout.frame_nbytes, [nbytes] * ranks, group)
    return layout.for_peer(own).decode_sum(received.view(ranks, nbytes))


def _all_gather(frame: Tensor, nbytes: tuple[int, ...], group: Any = None) -> Tensor:
    """Every rank's bytes, of these sizes, in rank order."""
    return _all_to_all(frame.repeat(len(nbytes)), [frame.numel()] * len(nbytes), nbytes, group)


def _all_to_all(
    send: Tensor, sending: Sequence[int], arriving: Sequence[int], group: Any = None
) -> Tensor:
    """Bytes for each rank of a group, and from each, in rank order."""
    out = torch.empty(sum(arriving), dtype=torch.uint8)
    dist.all_to_all_single(out, send, list(arriving), list(sending), group=group)
    return out
