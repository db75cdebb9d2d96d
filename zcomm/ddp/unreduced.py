"""Parameters that are trained but not reduced: DDP takes those that require grad when it is made.

Their gradients would stay this rank's own, and the ranks would drift apart without a word.
"""

from collections.abc import Callable, Container, Mapping

from torch import Tensor


class Unreduced:
    """`named` are the parameters that were trained when the hook met the model."""

    def __init__(self, named: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> None:
        self._named, self._frozen = named, frozen
        self._left_out: list[str] | None = None  # unfrozen before the hook met the model

    def compare(self, reduced: Callable[[], Container[int]]) -> None:
        """Call this after a step; `reduced` gives the ids of the parameters in its buckets."""
        if self._left_out is None:
            ids = reduced()
            self._left_out = [name for name, p in self._named.items() if id(p) not in ids]

    def names(self) -> list[str]:
        return [*(self._left_out or ()), *(n for n, p in self._frozen.items() if p.requires_grad)]

    def expect_none(self, rank: int) -> None:
        names = self.names()
        if names:
            raise ValueError(
                f"rank {rank}: backward: expected parameters that required grad when the model was "
                f"wrapped, got {names[0]!r}, unfrozen since: DDP does not reduce its gradient; "
                "unfreeze it and wrap the model again"
            )
