"""Which instructions there are, what operands they take, and the C++ that does the same.

A rule is a pattern of the opcode, its operands, and a line of C++. Patterns are parts between
dots; `T:INT` is one of a set and is called T, `x|y` is either, a part with `?` may be missing.
Operands are types; `=` is a destination, `+` allows a wider register, `imm` is a literal. An
opcode that no rule matches wholly is an error, so no modifier is ever ignored.
"""

import re
from dataclasses import dataclass

SETS = {
    "INT": "u16|s16|u32|s32|u64|s64",
    "INT8": "u8|s8|u16|s16|u32|s32|u64|s64",
    "WORD": "u32|s32|u64|s64",
    "HALF": "u16|s16|u32|s32",
    "SIGNED": "s16|s32|s64",
    "BITS": "b16|b32|b64",
    "LOGIC": "b16|b32|b64|pred",
    "FLOAT": "f32|f64",
    "REAL": "f32|f64|f32x2",
    "ANY": "b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64",
    "ORDER": "eq|ne|lt|le|gt|ge",
    "UNORDER": "equ|neu|ltu|leu|gtu|geu|num|nan",
    "UNSIGNED": "lo|ls|hi|hs",
    "ROUND": "rn|rz|rm|rp",
    "INTEGRAL": "rni|rzi|rmi|rpi",
}


@dataclass(frozen=True)
class Rule:
    pattern: re.Pattern[str]
    operands: tuple[str, ...]
    code: str


def rule(pattern: str, operands: str, code: str) -> Rule:
    return Rule(re.compile(as_regex(pattern)), tuple(operands.split()), code)


def as_regex(pattern: str) -> str:
    regex = ""
    for i, part in enumerate(pattern.split(".")):
        name, _, choice = part.removesuffix("?").rpartition(":")
        choice = "|".join(SETS.get(c, c) for c in choice.split("|"))
        group = f"(?P<{name}>{choice})" if name else f"(?:{choice})"
        dotted = rf"\.{group}" if i else group
        regex += f"(?:{dotted})?" if part.endswith("?") else dotted
    return regex


INTEGERS = [
    # Plain expressions where they do: the compiler takes half as long as over a function.
    rule("add.T:INT", "=T T T", "{0} = {1} + {2};"),
    rule("sub.T:INT", "=T T T", "{0} = {1} - {2};"),
    rule("mul.lo.T:INT", "=T T T", "{0} = 1u * {1} * {2};"),
    rule("mad.lo.T:INT", "=T T T T", "{0} = 1u * {1} * {2} + {3};"),
    rule("op:min|max.T:INT", "=T T T", "{0} = ptx::{op}<{T}>({1}, {2});"),
    rule("op:add|min|max.T:u16x2|s16x2", "=b32 b32 b32", "{0} = ptx::{op}_{T}({1}, {2});"),
    rule("op:add|sub.sat.s32", "=s32 s32 s32", "{0} = ptx::{op}_sat({1}, {2});"),
    rule("op:add|sub.cc.T:WORD", "=T T T", "{0} = ptx::{op}_cc<{T}>({1}, {2}, false, carry);"),
    rule("mul.hi.T:INT", "=T T T", "{0} = ptx::mul_hi<{T}>({1}, {2});"),
    rule("mul.wide.T:HALF", "=W T T", "{0} = ptx::mul_wide<{T}>({1}, {2});"),
    rule("mad.hi.T:INT", "=T T T T", "{0} = ptx::mul_hi<{T}>({1}, {2}) + {3};"),
    rule("mad.wide.T:HALF", "=W T T W", "{0} = ptx::mul_wide<{T}>({1}, {2}) + {3};"),
    rule("op:div|rem.T:INT", "=T T T", "{0} = ptx::{op}<{T}>({1}, {2});"),
    rule("op:abs|neg.T:SIGNED", "=T T", "{0} = ptx::{op}<{T}>({1});"),
    rule("sad.T:INT", "=T T T T", "{0} = ptx::sad<{T}>({1}, {2}, {3});"),
    rule(
        "dp4a.A:u32|s32.B:u32|s32", "=u32 u32 u32 u32", "{0} = ptx::dp4a<{A}, {B}>({1}, {2}, {3});"
    ),
]
for name, carried in (("add", "addc"), ("sub", "subc")):
    code = f"{{0}} = ptx::{name}_cc<{{T}}>({{1}}, {{2}}, carry, "
    INTEGERS += [
        rule(f"{carried}.cc.T:WORD", "=T T T", code + "carry);"),
        rule(f"{carried}.T:WORD", "=T T T", "{{ bool lost; " + code + "lost); }}"),
    ]
for half in ("lo", "hi"):
    code = f"{{0}} = ptx::add_cc<{{T}}>(ptx::mul_{half}<{{T}}>({{1}}, {{2}}), {{3}}, "
    INTEGERS += [
        rule(f"mad.{half}.cc.T:WORD", "=T T T T", code + "false, carry);"),
        rule(f"madc.{half}.cc.T:WORD", "=T T T T", code + "carry, carry);"),
        rule(f"madc.{half}.T:WORD", "=T T T T", "{{ bool lost; " + code + "carry, lost); }}"),
    ]

BIT_OPERATIONS = [
    rule("and.T:LOGIC", "=T T T", "{0} = {1} & {2};"),
    rule("or.T:LOGIC", "=T T T", "{0} = {1} | {2};"),
    rule("xor.T:LOGIC", "=T T T", "{0} = {1} ^ {2};"),
    rule("not.T:BITS", "=T T", "{0} = ~{1};"),
    rule("not.pred", "=pred pred", "{0} = !{1};"),
    rule("cnot.T:BITS", "=T T", "{0} = {1} == 0;"),
    rule("shl.T:BITS", "=T T u32", "{0} = ptx::shl<{T}>({1}, {2});"),
    rule("shr.T:INT|BITS", "=T T u32", "{0} = ptx::shr<{T}>({1}, {2});"),
    rule(
        "shf.side:l|r.m:wrap|clamp.b32",
        "=b32 b32 b32 u32",
        "{0} = ptx::shf_{side}_{m}({1}, {2}, {3});",
    ),
    rule("lop3.b32", "=b32 b32 b32 b32 imm", "{0} = ptx::lop3<{4}>({1}, {2}, {3});"),
    rule("prmt.b32", "=b32 b32 b32 b32", "{0} = ptx::prmt({1}, {2}, {3});"),
    rule(
        "prmt.b32.m:f4e|b4e|rc8|ecl|ecr|rc16",
        "=b32 b32 b32 b32",
        "{0} = ptx::prmt_{m}({1}, {2}, {3});",
    ),
    rule("op:popc|clz.T:b32|b64", "=u32 T", "{0} = ptx::{op}<{T}>({1});"),
    rule("brev.T:b32|b64", "=T T", "{0} = ptx::brev<{T}>({1});"),
    rule("bfind.T:WORD", "=u32 T", "{0} = ptx::bfind<{T}>({1});"),
    rule("bfind.shiftamt.T:WORD", "=u32 T", "{0} = ptx::bfind_shiftamt<{T}>({1});"),
    rule("bfe.T:WORD", "=T T u32 u32", "{0} = ptx::bfe<{T}>({1}, {2}, {3});"),
    rule("bfi.T:b32|b64", "=T T T u32 u32", "{0} = ptx::bfi<{T}>({1}, {2}, {3}, {4});"),
]

FLOATS = [
    rule("op:add|sub|mul.rn.T:REAL", "=T T T", "{0} = ptx::{op}<{T}>({1}, {2});"),
    rule("fma.rn.T:REAL", "=T T T T", "{0} = ptx::fma<{T}>({1}, {2}, {3});"),
    rule("div.rn.T:FLOAT", "=T T T", "{0} = ptx::div<{T}>({1}, {2});"),
    rule("op:sqrt|rcp.rn.T:FLOAT", "=T T", "{0} = ptx::{op}<{T}>({1});"),
    rule("op:abs|neg.T:FLOAT", "=T T", "{0} = ptx::{op}<{T}>({1});"),
    rule("op:min|max.T:FLOAT", "=T T T", "{0} = ptx::{op}<{T}>({1}, {2});"),
    rule(
        "op:min|max.f32", "=f32 f32 f32 f32", "{0} = ptx::{op}<f32>(ptx::{op}<f32>({1}, {2}), {3});"
    ),
    rule("op:min|max.NaN.f32", "=f32 f32 f32", "{0} = ptx::{op}_nan({1}, {2});"),
    rule(
        "op:min|max.NaN.f32",
        "=f32 f32 f32 f32",
        "{0} = ptx::{op}_nan(ptx::{op}_nan({1}, {2}), {3});",
    ),
    rule("copysign.T:FLOAT", "=T T T", "{0} = ptx::copysign<{T}>({1}, {2});"),
    rule(
        "testp.op:finite|infinite|number|notanumber|normal|subnormal.T:FLOAT",
        "=pred T",
        "{0} = ptx::testp_{op}<{T}>({1});",
    ),
]

# eq and ne of raw bits; an order of signed and unsigned integers; of floats also unordered ones.
COMPARISONS = [
    ("cmp:ORDER", "T:INT|FLOAT"),
    ("cmp:eq|ne", "T:BITS"),
    ("cmp:UNSIGNED", "T:u16|u32|u64"),
    ("cmp:UNORDER", "T:FLOAT"),
]
CHOICES = [
    rule("selp.T:ANY", "=T T T pred", "{0} = {3} ? {1} : {2};"),
    rule("slct.T:ANY.C:s32|f32", "=T T T C", "{0} = ptx::not_negative<{C}>({3}) ? {1} : {2};"),
]
for cmp, types in COMPARISONS:
    held = "const bool held = ptx::{cmp}<{T}>({1}, {2});"
    CHOICES += [
        rule(f"setp.{cmp}.{types}", "=pred T T", "{0} = ptx::{cmp}<{T}>({1}, {2});"),
        rule(
            f"setp.{cmp}.{types}",
            "=pred|pred T T",
            f"{{{{ {held} {{0}} = held; {{0q}} = !held; }}}}",
        ),
        rule(
            f"setp.{cmp}.op:and|or|xor.{types}",
            "=pred T T pred",
            "{0} = ptx::{op}_<pred>(ptx::{cmp}<{T}>({1}, {2}), {3});",
        ),
        rule(
            f"setp.{cmp}.op:and|or|xor.{types}",
            "=pred|pred T T pred",
            f"{{{{ {held} {{0}} = ptx::{{op}}_<pred>(held, {{3}}); "
            "{0q} = ptx::{op}_<pred>(!held, {3}); }}",
        ),
        rule(
            f"set.{cmp}.D:u32|s32.{types}",
            "=D T T",
            "{0} = -std::uint32_t(ptx::{cmp}<{T}>({1}, {2}));",
        ),
    ]

CONVERSIONS = [
    rule("cvt.D:INT8.A:INT8", "=D+ A+", "{0} = ptx::cvt<{D}, {A}, decltype({0})>({1});"),
    rule("cvt.sat.D:INT8.A:INT8", "=D+ A+", "{0} = ptx::cvt_sat<{D}, {A}, decltype({0})>({1});"),
    rule(
        "cvt.R:ROUND.D:FLOAT.A:INT8", "=D A+", "{0} = ptx::cvt_from_int<{D}, {A}, ptx::{R}>({1});"
    ),
    rule(
        "cvt.R:INTEGRAL.sat?.D:INT8.A:FLOAT",
        "=D+ A",
        "{0} = ptx::cvt_to_int<{D}, {A}, ptx::{R}, decltype({0})>({1});",
    ),
    rule("cvt.R:INTEGRAL.f32.f32", "=f32 f32", "{0} = ptx::cvt_integral<f32, ptx::{R}>({1});"),
    rule("cvt.R:INTEGRAL.f64.f64", "=f64 f64", "{0} = ptx::cvt_integral<f64, ptx::{R}>({1});"),
    rule("cvt.R:ROUND.f32.f64", "=f32 f64", "{0} = ptx::cvt_f32_f64<ptx::{R}>({1});"),
    rule("cvt.f64.f32", "=f64 f32", "{0} = ptx::cvt_f64_f32({1});"),
    rule("cvt.f32.A:f16|bf16", "=f32 A", "{0} = ptx::cvt_f32_{A}({1});"),
    rule("cvt.R:rn|rz.D:f16|bf16.f32", "=D f32", "{0} = ptx::cvt_{D}_f32<ptx::{R}>({1});"),
    rule(
        "cvt.R:rn|rz.D:f16x2|bf16x2.f32",
        "=D f32 f32",
        "{0} = ptx::cvt_{D}_f32<ptx::{R}>({1}, {2});",
    ),
]

FENCES = "cta|cluster|gpu|sys"
WARP = [
    rule("bar|barrier.cta?.sync.aligned?", "zero", "emu::barrier();"),
    rule("bar.warp.sync", "u32", "emu::ballot({0}, true);"),
    rule(f"membar.{'cta|gl|sys'}", "", "ptx::fence();"),
    rule(f"fence.acq_rel|sc|acquire|release.{FENCES}", "", "ptx::fence();"),
    rule(
        "shfl.sync.m:up|down|bfly|idx.b32",
        "=b32|pred b32 b32 b32 b32",
        "{{ const ptx::Shuffled s = ptx::shfl_{m}({1}, {2}, {3}, {4}); "
        "{0} = s.value; {0q} = s.in_range; }}",
    ),
    rule("vote.sync.ballot.b32", "=b32 pred u32", "{0} = emu::ballot({2}, {1});"),
    rule("vote.sync.m:any|all|uni.pred", "=pred pred u32", "{0} = ptx::vote_{m}({1}, {2});"),
    rule(
        "redux.sync.op:add|min|max.T:u32|s32", "=T T u32", "{0} = ptx::redux_{op}<{T}>({1}, {2});"
    ),
    rule("redux.sync.op:and|or|xor.b32", "=b32 b32 u32", "{0} = ptx::redux_{op}<b32>({1}, {2});"),
    rule("redux.sync.op:min|max.f32", "=f32 f32 u32", "{0} = ptx::redux_{op}<f32>({1}, {2});"),
    rule(
        "redux.sync.op:min|max.abs.f32",
        "=f32 f32 u32",
        "{0} = ptx::redux_{op}<f32>(ptx::abs<f32>({1}), {2});",
    ),
    rule("redux.sync.op:min|max.NaN.f32", "=f32 f32 u32", "{0} = ptx::redux_{op}_nan({1}, {2});"),
    rule(
        "redux.sync.op:min|max.abs.NaN.f32",
        "=f32 f32 u32",
        "{0} = ptx::redux_{op}_nan(ptx::abs<f32>({1}), {2});",
    ),
]

SPACE_CHANGES = [
    rule("cvta.to.global|local|param|const.u64", "=u64 u64", "{0} = {1};"),
    rule("cvta.to.shared.u64", "=u64 u64", "{0} = c.to_shared({1});"),
]
CONTROL = [
    rule("ret.uni?", "", "return;"),
    rule("exit", "", "return;"),
    rule("trap", "", "c.trap({line});"),
]

RULES = INTEGERS + BIT_OPERATIONS + FLOATS + CHOICES + CONVERSIONS + WARP + SPACE_CHANGES + CONTROL
