"""Codecs: formats, their names, and the calls that encode and decode with them.

A spec string names a codec: "lm4", "int8:block=256", "topk:0.01". Each codec has one file with its
byte table, its formula and a plain-torch reference; its class holds all of its properties. `layout`
encodes many segments in one call, `residuals` keeps what encoding leaves out.

Imports: kernels and below. Start with base.py, then int8.py. A new codec goes here.
"""

from functools import lru_cache

from zcomm.base.arguments import describe
from zcomm.codecs.base import Codec
from zcomm.codecs.bf16 import Bf16
from zcomm.codecs.format import Format
from zcomm.codecs.fp8 import Fp8
from zcomm.codecs.fp16 import Fp16
from zcomm.codecs.int4 import Int4
from zcomm.codecs.int8 import Int8
from zcomm.codecs.lm import Lm2, Lm3, Lm4
from zcomm.codecs.none import Plain
from zcomm.codecs.sign import Sign
from zcomm.codecs.topk import TopK

# Tables and lists use this order.
_FORMATS = (Plain, Bf16, Fp16, Int8, Fp8, Int4, Lm4, Lm3, Lm2, Sign, TopK)
KNOWN: dict[str, type[Format]] = {format.name: format for format in _FORMATS}
# One spec per codec.
SPECS = tuple(format.name + format.example for format in _FORMATS)


def codec(spec: str | Codec) -> Codec:
    """The codec for a spec string; returns a Codec unchanged."""
    if isinstance(spec, Codec):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"codec: expected a spec such as 'lm4' or a Codec, got {describe(spec)}")
    return _parse(spec)


@lru_cache(maxsize=256)
def _parse(spec: str) -> Codec:
    name, colon, option = spec.partition(":")
    if name == "auto":
        raise ValueError(
            "codec: expected a codec, got 'auto': zcomm.compress, zcomm.fsdp.compress and "
            "ZeroOptimizer choose one for a model; here, give its name, such as 'lm4'"
        )
    if name not in KNOWN:
        raise ValueError(f"codec: expected one of {', '.join(KNOWN)}, got {name!r}")
    return Codec(KNOWN[name].parse(option if colon else None))


__all__ = ["KNOWN", "SPECS", "Codec", "codec"]
