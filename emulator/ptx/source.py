"""PTX text to statements: comments and debug lines go, everything else is kept or refused."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
TYPE_NBYTES = {kind + bits: n for kind in "bus" for bits, n in SIZES.items()}
TYPE_NBYTES |= {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f32x2": 8, "f16x2": 4, "bf16x2": 4}


class PtxError(Exception):
    """What the translator refuses, with the line and the text of the statement."""

    def __init__(self, line: int, text: str, reason: str):
        super().__init__(f"line {line}: {reason}: {text}")


@dataclass(frozen=True)
class Statement:
    line: int
    text: str


@dataclass(frozen=True)
class Label:
    line: int
    name: str


@dataclass(frozen=True)
class Brace:
    line: int
    opens: bool


Item = Statement | Label | Brace


@dataclass(frozen=True)
class Variable:
    """An array or a scalar in an address space, or a parameter."""

    space: str
    name: str
    align: int
    nbytes: int
    extern: bool = False
    data: bytes = b""


@dataclass
class Kernel:
    name: str
    line: int
    params: list[Variable]
    body: list[Item] = field(default_factory=list)

    @property
    def param_offsets(self) -> dict[str, int]:
        """Where each parameter lies: one after another, as in a struct of C."""
        offsets, end = {}, 0
        for param in self.params:
            begin = -(-end // param.align) * param.align
            offsets[param.name], end = begin, begin + param.nbytes
        return offsets

    @property
    def params_nbytes(self) -> int:
        if not self.params:
            return 0
        return self.param_offsets[self.params[-1].name] + self.params[-1].nbytes


@dataclass
class Module:
    variables: list[Variable] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)


# Lines that say nothing about what is computed. They have no semicolon.
DEBUG_LINE = re.compile(r"^[ \t]*\.(?:loc|file|version|target|address_size)\b[^\n]*", re.M)
# What debuggers read. It has braces, and no other ones inside.
DEBUG_SECTION = re.compile(r"^[ \t]*\.section[ \t]+\.debug_\w+\s*\{[^{}]*\}", re.M)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
HEADER = re.compile(r"(?:\.(?:visible|weak)\s+)?\.entry\b[^{;]*")
ENTRY = re.compile(r"(?:\.\w+\s+)?\.entry\s+([\w$]+)\s*(?:\((.*?)\))?\s*(.*)", re.S)
# How many threads and registers a CTA may have: nothing that the emulator needs to know.
LIMIT = re.compile(r"\.(?:maxntid|reqntid|minnctapersm|maxnreg)\s+\d+(?:\s*,\s*\d+)*\s*")
VARIABLE = re.compile(
    r"(?P<linkage>(?:\.(?:visible|extern|weak)\s+)*)"
    r"\.(?P<space>global|const|shared|local|param)\s+"
    r"(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?:\.ptr\s+(?:\.(?:global|shared|local|const)\s+)?(?:\.align\s+\d+\s+)?)?"
    r"(?P<name>[\w$]+)\s*(?P<count>\[\d*\])?(?:\s*=\s*(?P<values>.*))?"
)


def without_comments(text: str) -> str:
    """Comments and debug lines become blanks, so that line numbers stay."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    if not re.search(r"^\s*\.address_size\s+64\s*$", text, re.M):
        raise PtxError(1, ".address_size", "expected .address_size 64: compile with -m64")
    return DEBUG_LINE.sub(blank, DEBUG_SECTION.sub(blank, COMMENT.sub(blank, text)))


def items(text: str) -> Iterator[Item]:
    """Statements, labels, and the braces of scopes; a brace inside of a statement belongs to it."""
    at, line = 0, 1
    while at < len(text):
        if text[at].isspace():
            line += text[at] == "\n"
            at += 1
            continue
        if text[at] in "{}":
            yield Brace(line, text[at] == "{")
            at += 1
            continue
        if found := LABEL.match(text, at):
            yield Label(line, found[1])
            end = found.end()
        else:
            header = HEADER.match(text, at)
            end = header.end() if header else text.find(";", at)
            if end < 0:
                raise PtxError(line, text[at : at + 40], "expected a semicolon")
            yield Statement(line, " ".join(text[at:end].split()))
            end += header is None
        line += text.count("\n", at, end)
        at = end


def parse_variable(statement: Statement) -> Variable:
    found = VARIABLE.fullmatch(statement.text)
    if found is None or found["type"] not in TYPE_NBYTES:
        raise PtxError(statement.line, statement.text, "unknown directive")
    nbytes = TYPE_NBYTES[found["type"]]
    data = initial_bytes(statement, found["values"], nbytes) if found["values"] else b""
    count = int(found["count"][1:-1] or 0) if found["count"] else 1
    extern = ".extern" in found["linkage"]
    if extern != (count == 0) or (extern and found["space"] != "shared"):
        raise PtxError(statement.line, statement.text, "only .extern .shared arrays have no size")
    if len(data) > count * nbytes:
        raise PtxError(statement.line, statement.text, "more initial values than elements")
    align = int(found["align"] or nbytes)
    return Variable(found["space"], found["name"], align, count * nbytes, extern, data)


def initial_bytes(statement: Statement, values: str, nbytes: int) -> bytes:
    data = b""
    for value in values.strip("{}").split(","):
        if not re.fullmatch(r"\s*(-?\d+|0[xX][0-9a-fA-F]+|0[fFdD][0-9a-fA-F]+)\s*", value):
            raise PtxError(statement.line, value, "expected a number as initial value")
        number = integer(value.strip())
        data += (number & (1 << 8 * nbytes) - 1).to_bytes(nbytes, "little")
    return data


def integer(text: str) -> int:
    """The bits of a literal: decimal, hexadecimal, octal, or a float's as 0f and 0d."""
    digits = text.lstrip("-").rstrip("U")
    sign = -1 if text.startswith("-") else 1
    if digits[:2] in ("0f", "0F", "0d", "0D", "0x", "0X"):
        return sign * int(digits[2:], 16)
    octal = digits.startswith("0") and digits.isdigit()
    return sign * int(digits, 8 if octal else 10)


def parse_entry(statement: Statement) -> Kernel:
    found = ENTRY.fullmatch(statement.text)
    if found is None or LIMIT.sub("", found[3]):
        raise PtxError(statement.line, statement.text, "unknown .entry")
    params = [p.strip() for p in (found[2] or "").split(",") if p.strip()]
    return Kernel(found[1], statement.line, [parameter(statement, p) for p in params])


def parameter(statement: Statement, text: str) -> Variable:
    variable = parse_variable(Statement(statement.line, text))
    if variable.space != "param" or variable.data:
        raise PtxError(statement.line, text, "expected a parameter")
    return variable


def parse(text: str) -> Module:
    """All kernels of a PTX file, and the variables outside of them."""
    module, kernel, depth = Module(), None, 0
    for item in items(without_comments(text)):
        if isinstance(item, Brace):
            depth += 1 if item.opens else -1
            if kernel is None or depth < 0:
                raise PtxError(item.line, "{", "a brace outside of a kernel")
        if kernel is not None:
            kernel.body.append(item)
            kernel = None if depth == 0 else kernel
        elif isinstance(item, Statement) and HEADER.match(item.text):
            kernel = parse_entry(item)
            module.kernels.append(kernel)
        elif isinstance(item, Statement):
            module.variables.append(parse_variable(item))
        else:
            raise PtxError(item.line, str(item), "expected a directive")
    if kernel is not None:
        raise PtxError(kernel.line, kernel.name, "the kernel has no end")
    return module
