"""Planning: the memory and the time of a training run, before it starts.

`memory` has `zcomm.plan`; `buffer_memory` and `optimizer_memory` do its parts.
`cost` models the time of a collective and of a training step, from a profile of the machine:
`default_profile.json`, or one measured by `zcomm bench --fit`.

Imports: zero, ddp and below. Start with memory.py.
"""
