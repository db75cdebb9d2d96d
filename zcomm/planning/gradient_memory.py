"""Gradients under DDP: its buckets, and the gradients autograd creates besides them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zcomm.base import arguments
from zcomm.torch_private.ddp import FIRST_BUCKET_BYTES, assign_buckets

_BUCKET_CAP_MB = 25  # DDP's default

Named = dict[str, Tensor]


class LocalGradients:
    """What autograd allocates besides DDP's buckets: all gradients or, with views, one at a time.

    `whole` is alive at the end of the first backward(), `kept` after it, and `in_bucket` until a
    later bucket is handed over. `bucket` has the parameters of the largest bucket.
    """

    def __init__(self, trained: Named, bucket_cap_mb: float | None, views: bool) -> None:
        self.bucket = _largest_bucket(trained, _bucket_limits(bucket_cap_mb))
        largest = max((p.nbytes for p in trained.values()), default=0)
        self.kept = 0 if views else nbytes_of(trained)
        self.whole = largest if views else self.kept
        self.in_bucket = largest if views else nbytes_of(self.bucket)


def _bucket_limits(bucket_cap_mb: Any) -> list[int]:
    """The size limits of DDP's first bucket and of the others."""
    if bucket_cap_mb is None:
        return [FIRST_BUCKET_BYTES, _BUCKET_CAP_MB * 2**20]
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)):
        got = arguments.describe(bucket_cap_mb)
        raise TypeError(f"bucket_cap_mb: expected a number, got {got}")
    if not 0 < bucket_cap_mb < float("inf"):
        raise ValueError(f"bucket_cap_mb: expected more than 0, got {bucket_cap_mb}")
    return [int(bucket_cap_mb * 2**20)]


def _largest_bucket(trained: Named, limits: list[int]) -> Named:
    """The largest of DDP's buckets from the second iteration on, in order of arrival."""
    names = list(trained)[::-1]
    if not names:
        return {}
    buckets, _ = assign_buckets([trained[n] for n in names], limits)
    named = [{names[i]: trained[names[i]] for i in bucket} for bucket in buckets]
    return max(named, key=nbytes_of)


def nbytes_of(named: Named) -> int:
    return sum(p.nbytes for p in named.values())
