"""FSDP2: `zcomm.fsdp.compress(model)` for a model with `fully_shard`.

`reshard_after_forward=False` is ZeRO stage 2, `True` is stage 3; zcomm sends the same bytes for
both. `communication` has the two collectives that FSDP calls, `modules` what zcomm knows of an FSDP
module, `compressor` the steps of one model.

Imports: engine and below. Start with communication.py.
"""

from zcomm.engine.handle import Handle
from zcomm.fsdp.communication import compress

__all__ = ["Handle", "compress"]
