"""Transport: bytes between ranks, over process groups that nobody else uses.

`channels` owns the groups. `failure_notes` finds out which rank failed and makes the error.
`handshake` is how ranks meet before their first byte: same settings, a shared name, their hosts.
`store` asks the store through which all of this goes, with a deadline.
`restarts` warns of a store in which restarted ranks would meet dead ones. `gloo_threads` keeps a
process that has finished from aborting.
`point_to_point` sends tensors over the user's group, with a deadline.
`shared_memory` gives the ranks of a host memory that they share, and the ring in which they take
turns. Where there is one, no Channel connects until a job needs it.

Imports: sharding and below. Start with channels.py.
"""
