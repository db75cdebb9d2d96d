"""Checkpoints on disk, in a folder that all ranks share: all of a checkpoint, or none of it.

`save_load` has the two public functions; `state_checks` refuses states that would not be complete;
`agreement` is how the ranks tell each other what they see, so that all of them fail or none;
`folder` is what is on disk, and how much of it there is.

Imports: zero and below. Start with save_load.py.
"""

from zcomm.checkpoint.save_load import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
