"""Shared memory among the ranks of a host: each rank has a segment that its peers read.

`segment` makes and maps the memory. `meeting` hands it over. `sharing` decides, for all ranks of a
host, whether they have shared memory.

Who may map what:

- A segment is an anonymous file (memfd). It has no path, takes nothing of /dev/shm, and is gone
  with the last process that maps it, however that ends.
- Only its owner writes it: it is sealed once the owner has mapped it, and from then on nobody can
  map it for writing or change its size. So a peer can neither damage another rank's memory nor cut
  it short under a reader. What a peer writes into its own segment can be anything, at any time.
- Its descriptor goes to processes of the same user that know the token of a rank, and to no other.
  The user is what protects it: the kernel vouches for the uid at both ends of a connection. The
  token tells ranks and jobs of that user apart; whoever reads the store can read it. Names of
  sockets are random but public (/proc/net/unix). Where a user namespace shows unknown users as
  "nobody" and the ranks run as "nobody" too, only the token protects a segment.
- A receiver trusts no descriptor: it checks seals and size, then maps it read-only.

A rank holds two descriptors for each peer: the connection, and the peer's process (pidfd). A forked
child closes them and unmaps all segments: else its copy of a connection would hide the death of its
parent from peers that have no pidfd. That works for forks through Python; a child that native code
forks keeps them until it calls exec.

Imports: handshake, sharding and below. Start with sharing.py.
"""

from zcomm.transport.shared_memory.segment import NoSharedMemory, PeerSegment, Segment
from zcomm.transport.shared_memory.sharing import SharedMemory, share

__all__ = ["NoSharedMemory", "PeerSegment", "Segment", "SharedMemory", "share"]
