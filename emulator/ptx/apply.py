"""Finds the rule of a statement and fills in its C++."""

import functools
import re
from collections.abc import Sequence

from .instructions import RULES, Rule
from .operands import Operands

WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def apply(o: Operands, opcode: str, operands: list[str]) -> str:
    """The C++ of the one rule that the whole opcode and the number of operands match."""
    matches = rules_of(opcode)
    if not matches:
        raise o.refuse(f"unknown instruction {opcode}")
    for rule, names in matches:
        if len(rule.operands) == len(operands) and has_pair(rule.operands) >= has_pair(operands):
            return fill(o, rule, names, operands)
    counts = " or ".join(sorted({str(len(r.operands)) for r, _ in matches}))
    raise o.refuse(f"wrong number of operands: expected {counts}, got {len(operands)}")


@functools.cache
def rules_of(opcode: str) -> list[tuple[Rule, dict[str, str]]]:
    return [(r, m.groupdict()) for r in RULES if (m := r.pattern.fullmatch(opcode))]


def has_pair(operands: Sequence[str]) -> bool:
    """Whether there are two destinations, as in `d|p`."""
    return bool(operands) and "|" in operands[0]


def fill(o: Operands, rule: Rule, names: dict[str, str], operands: list[str]) -> str:
    types = dict(names)
    if "T" in names:
        types["W"] = WIDE.get(names["T"], "")
    values: dict[str, str] = {}
    for i, (spec, text) in enumerate(zip(rule.operands, operands)):
        kind = spec.strip("=+")
        if "|" in kind:
            first, second = kind.split("|")
            values[f"_{i}"], values[f"_{i}q"] = o.pair(text, (first, second))
        elif kind == "zero" and text != "0":
            raise o.refuse(f"expected barrier 0, got {text}")
        elif kind in ("imm", "zero"):
            values[f"_{i}"] = o.constant(text)
        else:
            read = o.register if spec.startswith("=") else o.source
            values[f"_{i}"] = read(text, types.get(kind, kind), spec.endswith("+"))
    code = re.sub(r"\{(\dq?)\}", r"{_\1}", rule.code)
    return code.format(**names, **values, line=o.statement.line)
