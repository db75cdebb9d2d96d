"""Planning: the memory and the time of a training run, before it starts.

`memory` is `zcomm.plan`, with `buffer_memory`, `gradient_memory` and `optimizer_memory` for its
parts. `cost` models the time of a collective, `step_cost` that of a training step, from a profile
of the machine (`default_profile`, or one that `zcomm bench --fit` measured).

Imports: zero, ddp and below. Start with memory.py.
"""
