"""The known codecs and their spec strings: "lm4", "int8:block=256", "topk:0.01"."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache

from zcomm.base.arguments import describe
from zcomm.codecs.base import Codec
from zcomm.codecs.bf16 import Bf16
from zcomm.codecs.blocks import BLOCKS, BlockFormat
from zcomm.codecs.format import Format
from zcomm.codecs.fp8 import Fp8
from zcomm.codecs.fp16 import Fp16
from zcomm.codecs.int4 import Int4
from zcomm.codecs.int8 import Int8
from zcomm.codecs.lm import Lm2, Lm3, Lm4
from zcomm.codecs.none import Plain
from zcomm.codecs.plain import PlainFormat
from zcomm.codecs.sign import Sign
from zcomm.codecs.topk import TopK

# Exponents are short so that a spec cannot ask for a number of a million digits.
_DECIMAL = re.compile(r"(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?")


def codec(spec: str | Codec) -> Codec:
    """The codec of a spec string; a Codec is returned as it is."""
    if isinstance(spec, Codec):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"codec: expected a spec such as 'lm4' or a Codec, got {describe(spec)}")
    return _parse(spec)


@lru_cache(maxsize=256)
def _parse(spec: str) -> Codec:
    name, colon, option = spec.partition(":")
    if name not in KNOWN:
        raise ValueError(f"codec: expected one of {', '.join(KNOWN)}, got {name!r}")
    return Codec(KNOWN[name](option if colon else None))


def _plain(format: type[PlainFormat]) -> Callable[[str | None], Format]:
    def make(option: str | None) -> Format:
        if option is not None:
            raise ValueError(f"codec {format.name}: expected no option, got {option!r}")
        return format()

    return make


def _blocks(format: type[BlockFormat]) -> Callable[[str | None], Format]:
    def make(option: str | None) -> Format:
        if option is None:
            return format()
        key, _, value = option.partition("=")
        if key != "block" or value not in map(str, BLOCKS):
            sizes = ", ".join(map(str, BLOCKS))
            raise ValueError(
                f"codec {format.name}: expected the option block= one of {sizes}, got {option!r}"
            )
        return format(int(value))

    return make


def _topk(option: str | None) -> Format:
    matched = _DECIMAL.fullmatch(option or "")
    if not matched or not 0 < Decimal(matched[0]) <= 1:
        got = repr(option) if option else "no ratio"
        raise ValueError(
            f"codec topk: expected topk:R with a decimal number 0 < R <= 1, such as topk:0.01, "
            f"got {got}"
        )
    text = f"{Decimal(matched[0]):f}"
    return TopK(text.rstrip("0").rstrip(".") if "." in text else text)


KNOWN: dict[str, Callable[[str | None], Format]] = {
    "none": _plain(Plain),
    "bf16": _plain(Bf16),
    "fp16": _plain(Fp16),
    "int8": _blocks(Int8),
    "fp8": _blocks(Fp8),
    "int4": _blocks(Int4),
    "lm4": _blocks(Lm4),
    "lm3": _blocks(Lm3),
    "lm2": _blocks(Lm2),
    "sign": _blocks(Sign),
    "topk": _topk,
}

__all__ = ["KNOWN", "Codec", "codec"]
