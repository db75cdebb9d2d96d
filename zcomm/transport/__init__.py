"""Transport: bytes between ranks, over process groups that nobody else uses.

`channels` owns the groups, finds out which rank failed, and makes the error that says so.
`handshake` is how ranks meet before their first byte: same settings, a shared name, their hosts.
`restarts` warns of a store in which restarted ranks would meet dead ones.
A new transport (shared memory, for one) goes here, behind the interface of a Channel.

Imports: sharding and below. Start with channels.py.
"""
