"""Shared memory among the ranks of a host: each rank has a segment that its peers read.

`segment` makes and maps the memory. `meeting` hands it over. `sharing` decides, for all ranks of a
host, whether they have shared memory. `ring` is how they take turns on it.

Only its owner writes a segment: an anonymous file, sealed. Its descriptor goes to processes of the
same user that know the token of a rank. A receiver checks seals and size, and maps it read-only.
docs/shared-memory.md has the layout, the protocol, and who may map what, and why.

Imports: handshake, sharding and below. Start with sharing.py.
"""

from zcomm.transport.shared_memory.segment import NoSharedMemory, PeerSegment, Segment
from zcomm.transport.shared_memory.sharing import SharedMemory, share

__all__ = ["NoSharedMemory", "PeerSegment", "Segment", "SharedMemory", "share"]
