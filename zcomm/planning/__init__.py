"""Planning: the memory of a training run, before it starts. (Its time: zcomm.engine.tuning.cost.)

`memory` has `zcomm.plan`; `buffer_memory` and `optimizer_memory` do its parts.

Imports: zero, ddp and below. Start with memory.py.
"""
