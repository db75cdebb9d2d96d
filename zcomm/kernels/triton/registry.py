"""Every kernel and variant, for whoever launches them or compiles them ahead of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from zcomm.kernels.triton import blocks, plain
from zcomm.kernels.triton.arguments import ARGUMENT_TYPE, DECODE_ARGUMENTS, ENCODE_ARGUMENTS
from zcomm.kernels.triton.plan import PLAIN_BLOCK
from zcomm.wire import CODEC_IDS

TILE_ELEMENTS = 4096
OPTIONS = MappingProxyType({"enable_fp_fusion": False})

_LOG2_BLOCKS = range(5, 11)
_LOG2_PLAIN = PLAIN_BLOCK.bit_length() - 1
_BLOCK_CODECS = {"int8": 8, "fp8": 8, "int4": 4, "lm4": 4, "lm3": 3, "lm2": 2, "sign": 1}
_PLAIN_CODECS = ("none", "bf16", "fp16")


@dataclass(frozen=True)
class Variant:
    """A kernel as it is compiled: `function` with its constexprs, and how many warps run it."""

    name: str  # of this variant: "encode_int4_128"
    function: Any
    arguments: Sequence[str]
    constexprs: Mapping[str, int]
    num_warps: int

    @property
    def signature(self) -> dict[str, str]:
        """Of all parameters, in their order."""
        types = dict.fromkeys(self.arguments, ARGUMENT_TYPE)
        return types | dict.fromkeys(self.constexprs, "constexpr")

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's, besides those of the target."""
        return {"num_warps": self.num_warps, **OPTIONS}


@cache
def variant(call: str, codec: int, log2_block: int, tile_elements: int) -> Variant:
    """`call` is "encode" or "decode"; log2_block is 0 for a codec without blocks."""
    for found in variants(tile_elements):
        if found.name == _name(call, _NAMES[codec], log2_block):
            return found
    raise AssertionError(f"no kernel for {call} of codec {codec}, blocks of 2^{log2_block}")


@cache
def variants(tile_elements: int = TILE_ELEMENTS) -> tuple[Variant, ...]:
    """All of them, for tiles of this many elements: a multiple of 1024 that divides 65536."""
    found = []
    for name, width in _BLOCK_CODECS.items():
        for log2 in _LOG2_BLOCKS:
            constexprs = {"CODEC": CODEC_IDS[name], "WIDTH": width, "ROWS": tile_elements >> log2}
            found += _pair(blocks.encode_blocks, blocks.decode_blocks, name, log2, constexprs)
    for name in _PLAIN_CODECS:
        constexprs = {"CODEC": CODEC_IDS[name], "ROWS": tile_elements >> _LOG2_PLAIN}
        found += _pair(plain.encode_plain, plain.decode_plain, name, 0, constexprs)
    return tuple(found)


_NAMES = {id_: name for name, id_ in CODEC_IDS.items()}


def _name(call: str, codec: str, log2_block: int) -> str:
    return f"{call}_{codec}" + (f"_{1 << log2_block}" if log2_block else "")


def _pair(
    encode: Any, decode: Any, codec: str, log2: int, constexprs: dict[str, int]
) -> list[Variant]:
    given = {**constexprs, "LOG2": log2 or _LOG2_PLAIN}
    return [
        Variant(_name("encode", codec, log2), encode, ENCODE_ARGUMENTS, given, num_warps=8),
        Variant(_name("decode", codec, log2), decode, DECODE_ARGUMENTS, given, num_warps=4),
    ]
