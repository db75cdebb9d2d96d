"""Every kernel and variant, to launch or to compile ahead of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from zcomm.kernels.triton import blocks, idle, plain, topk, topk_decode, topk_write
from zcomm.kernels.triton.arguments import ARGUMENT_TYPE, DECODE_ARGUMENTS, ENCODE_ARGUMENTS
from zcomm.kernels.triton.plan import BLOCK_WIDTHS, PLAIN_BLOCK, PLAIN_WIDTHS, TOPK_DIGITS
from zcomm.wire.header import CODEC_IDS

# A tile is one warp's work, in steps that fit its registers, so that sums over a block stay out
# of shared memory. Warps share larger blocks, so that each lane has few elements and spills none.
TILE_ELEMENTS = 2048
STEP_ELEMENTS = 128
OPTIONS = MappingProxyType({"enable_fp_fusion": False})
_REGISTERS = 65536  # of a multiprocessor

_LOG2_BLOCKS = range(5, 11)
_LOG2_PLAIN = PLAIN_BLOCK.bit_length() - 1
_WARPS = {256: 2, 512: 2, 1024: 4}
_CALLS = ("encode", "decode")
_CHUNK = 1024  # tiles or entries that topk handles together


@dataclass(frozen=True)
class Variant:
    """A kernel as it is compiled: `function` with its constexprs, and how many warps run it."""

    name: str  # such as "encode_int4_128"
    function: Any
    arguments: Sequence[str]
    constexprs: Mapping[str, int]
    num_warps: int

    @property
    def signature(self) -> dict[str, str]:
        """The types of all parameters, in order."""
        types = dict.fromkeys(self.arguments, ARGUMENT_TYPE)
        return types | dict.fromkeys(self.constexprs, "constexpr")

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's options for any target."""
        return {"num_warps": self.num_warps, **OPTIONS}

    def options_for(self, backend: str) -> dict[str, Any]:
        """The compiler's options for a backend: "cuda" or another one."""
        if backend != "cuda":
            return self.options
        # As many registers as a thread can have, with all of a program's in one multiprocessor.
        # By itself, ptxas would spill a few to run more programs at once.
        return {**self.options, "maxnreg": min(_REGISTERS // (32 * self.num_warps), 255)}


@cache
def variant(
    name: str, tile_elements: int = TILE_ELEMENTS, step_elements: int = STEP_ELEMENTS
) -> Variant:
    """The variant of this name."""
    known = variants(tile_elements, step_elements)
    return next(found for found in known if found.name == name)


@cache
def variants(
    tile_elements: int = TILE_ELEMENTS, step_elements: int = STEP_ELEMENTS
) -> tuple[Variant, ...]:
    """All variants for tiles of this many elements, a power of two from 1024 to 65536, and steps of
    this many, at least a block and at most a tile."""
    found = []
    for name, width in BLOCK_WIDTHS.items():
        for log2 in _LOG2_BLOCKS:
            rows = _rows(log2, tile_elements, step_elements)
            constexprs = {"CODEC": CODEC_IDS[name], "WIDTH": width, **rows}
            found += _pair(blocks.encode_blocks, blocks.decode_blocks, name, log2, constexprs)
    rows = _rows(_LOG2_PLAIN, tile_elements, step_elements)
    for name in PLAIN_WIDTHS:
        constexprs = {"CODEC": CODEC_IDS[name], **rows}
        found += _pair(plain.encode_plain, plain.decode_plain, name, 0, constexprs)
    return (*found, *_topk(tile_elements), _idle(tile_elements))


def variant_name(call: str, codec: int, block: int) -> str:
    """`call` is "encode" or "decode"; the block is 0 for a codec without blocks."""
    return f"{call}_{_NAMES[codec]}" + (f"_{block}" if block else "")


def topk_encode() -> tuple[str, ...]:
    """The names of topk's launches, in order."""
    return (
        *(f"topk_digit_{i}" for i in range(TOPK_DIGITS)),
        "topk_count",
        "topk_share",
        "topk_write",
    )


_NAMES = {id_: name for name, id_ in CODEC_IDS.items()}


def _rows(log2: int, tile_elements: int, step_elements: int) -> dict[str, int]:
    step = max(min(step_elements, tile_elements), 1 << log2)
    return {"STEPS": tile_elements // step, "ROWS": step >> log2, "LOG2": log2}


def _pair(
    encode: Any, decode: Any, codec: str, log2: int, constexprs: dict[str, int]
) -> list[Variant]:
    names = (variant_name(call, CODEC_IDS[codec], 1 << log2 if log2 else 0) for call in _CALLS)
    encode_name, decode_name = names
    warps = _WARPS.get(1 << log2, 1)
    return [
        Variant(encode_name, encode, ENCODE_ARGUMENTS, constexprs, num_warps=warps),
        Variant(decode_name, decode, DECODE_ARGUMENTS, constexprs, num_warps=warps),
    ]


def _topk(tile_elements: int) -> list[Variant]:
    rows = {"ROWS": tile_elements >> _LOG2_PLAIN, "LOG2": _LOG2_PLAIN}
    digits = [
        Variant(name, topk.topk_digit, ENCODE_ARGUMENTS, {"DIGIT": i, **rows}, num_warps=8)
        for i, name in enumerate(topk_encode()[:TOPK_DIGITS])
    ]
    chunk = {"CHUNK": _CHUNK}
    sizes = {"TILE": tile_elements, **chunk}
    return [
        *digits,
        Variant("topk_count", topk.topk_count, ENCODE_ARGUMENTS, rows, num_warps=8),
        Variant("topk_share", topk.topk_share, ENCODE_ARGUMENTS, chunk, num_warps=8),
        Variant("topk_write", topk_write.topk_write, ENCODE_ARGUMENTS, rows, num_warps=8),
        Variant("decode_topk", topk_decode.decode_topk, DECODE_ARGUMENTS, sizes, num_warps=8),
    ]


def _idle(tile_elements: int) -> Variant:
    chunk = {"CHUNK": 4 * tile_elements}
    return Variant("find_idle", idle.find_idle, ENCODE_ARGUMENTS, chunk, num_warps=8)
