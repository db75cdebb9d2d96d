"""The end of backward(), as autograd tells it."""

from __future__ import annotations

from typing import Any

import torch


def at_end_of_backward(callback: Any) -> bool:
    """Has autograd call it when backward() is done; False if no backward() is under way."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True
