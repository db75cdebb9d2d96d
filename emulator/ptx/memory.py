"""Loads, stores and atomics as C++."""

import re

from .operands import Operands, nbytes_of

TYPE = r"\.(?P<type>[bus](?:8|16|32|64)|f32|f64)"
SCOPE = r"\.(?:cta|cluster|gpu|sys)"
SPACE = r"(?:\.(?P<space>global|shared|local|param|const)(?:::cta|::entry)?)?"
# Caches change when bytes move, never what they are.
CACHE = (
    r"(?:\.L1::(?:evict_(?:normal|unchanged|first|last)|no_allocate))?(?:\.L2::(?:64|128|256)B)?"
)
LOAD = re.compile(
    rf"ld(?P<order>\.weak|\.volatile|\.(?:relaxed|acquire){SCOPE})?{SPACE}"
    rf"(?:\.(?:ca|cg|cs|lu|cv))?(?:\.nc)?{CACHE}(?:\.v(?P<count>[248]))?{TYPE}"
)
STORE = re.compile(
    rf"st(?P<order>\.weak|\.volatile|\.(?:relaxed|release){SCOPE})?{SPACE}"
    rf"(?:\.(?:wb|cg|cs|wt))?{CACHE}(?:\.v(?P<count>[248]))?{TYPE}"
)
# Triton's own order of the modifiers, which ptxas takes as well, is the other way round.
ORDER = r"\.(?:relaxed|acquire|release|acq_rel)"
ATOMIC = re.compile(
    rf"(?P<name>atom|red)(?:(?:{ORDER})?(?:{SCOPE})?{SPACE}|\.(?P<first>global|shared){SCOPE}{ORDER})"
    rf"\.(?P<op>add|min|max|and|or|xor|exch|cas|inc|dec){TYPE}"
)
ATOMIC_TYPES = {
    **dict.fromkeys(("add", "inc", "dec"), ("u32", "s32", "u64")),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64")),
    **dict.fromkeys(("and", "or", "xor", "exch", "cas"), ("b32", "b64")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
}
MAX_NBYTES = 32


def pointer(o: Operands, found: re.Match[str], text: str, nbytes: int, access: str) -> str:
    """The host address of an access, once it has been checked and counted."""
    space = space_of(found)
    address = o.address(text, space)
    method = {"": "generic", "const": "constant", "param": "parameter"}.get(space, space)
    return f"c.{method}<{nbytes}, ptx::{access}>({address}, {o.statement.line})"


def space_of(found: re.Match[str]) -> str:
    """ "" stands for a generic address."""
    groups = found.groupdict()
    return groups["space"] or groups.get("first") or ""


def element_types(o: Operands, found: re.Match[str], elements: list[str]) -> int:
    count, nbytes = int(found["count"] or 1), nbytes_of(found["type"])
    if len(elements) != count:
        raise o.refuse(f"expected {count} elements, got {len(elements)}")
    if count * nbytes > MAX_NBYTES:
        raise o.refuse(f"expected at most {MAX_NBYTES} bytes, got {count * nbytes}")
    return nbytes


def load(o: Operands, found: re.Match[str], operands: list[str]) -> str:
    expect(o, operands, 2)
    elements = o.vector(operands[0])
    nbytes, kind = element_types(o, found, elements), found["type"]
    read = "read" if found["order"] in (None, ".weak") else "read_atomic"
    code = f"const char* p = {pointer(o, found, operands[1], nbytes * len(elements), 'kLoad')};"
    for i, element in enumerate(elements):
        if element != "_":
            name = o.register(element, kind, wider=True)
            code += f" {name} = ptx::{read}<{kind}, decltype({name})>(p + {i * nbytes});"
    return f"{{ {code} }}"


def store(o: Operands, found: re.Match[str], operands: list[str]) -> str:
    expect(o, operands, 2)
    if found["space"] in ("param", "const"):
        raise o.refuse(f".{found['space']} memory cannot be written")
    elements = o.vector(operands[1])
    nbytes, kind = element_types(o, found, elements), found["type"]
    write = "write" if found["order"] in (None, ".weak") else "write_atomic"
    code = f"char* p = {pointer(o, found, operands[0], nbytes * len(elements), 'kStore')};"
    for i, element in enumerate(elements):
        value = o.source(element, kind, wider=True)
        code += f" ptx::{write}<{kind}>(p + {i * nbytes}, {value});"
    return f"{{ {code} }}"


def atomic(o: Operands, found: re.Match[str], operands: list[str]) -> str:
    op, kind = found["op"], found["type"]
    if kind not in ATOMIC_TYPES[op] or space_of(found) in ("local", "param", "const"):
        raise o.refuse(f"unknown type or space of {found['name']}.{op}")
    returns = found["name"] == "atom"
    if not returns and op in ("exch", "cas"):
        raise o.refuse("red returns nothing: expected atom")
    expect(o, operands, 2 + returns + (op == "cas"))
    to = operands.pop(0) if returns else "_"
    result = "" if to == "_" else f"{o.register(to, kind)} = "
    where = pointer(o, found, operands[0], nbytes_of(kind), "kAtomic")
    values = ", ".join(o.source(v, kind) for v in operands[1:])
    return f"{result}ptx::atom_{op}<{kind}>({where}, {values});"


def expect(o: Operands, operands: list[str], count: int) -> None:
    if len(operands) != count:
        raise o.refuse(f"wrong number of operands: expected {count}, got {len(operands)}")


def matrix(o: Operands, found: re.Match[str], operands: list[str]) -> str:
    """ldmatrix and stmatrix: 8 rows of 16 bytes a matrix, a warp's lanes together."""
    expect(o, operands, 2)
    is_load = found["name"] == "ldmatrix"
    registers, address = operands if is_load else reversed(operands)
    parts, count = o.vector(registers), int(found["count"])
    if len(parts) != count:
        raise o.refuse(f"expected {count} elements, got {len(parts)}")
    values = [(o.register if is_load else o.source)(part, "b32") for part in parts]
    way = "true" if found["trans"] else "false"
    shape = f"<{count}, {way}>(c, {o.address(address, 'shared')}, {o.statement.line}"
    if not is_load:
        return f"ptx::stmatrix{shape}, {{{', '.join(values)}}});"
    taken = " ".join(f"{name} = m.part[{i}];" for i, name in enumerate(values))
    return f"{{ const auto m = ptx::ldmatrix{shape}); {taken} }}"


MATRIX = re.compile(
    r"(?P<name>ldmatrix|stmatrix)\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<trans>\.trans)?"
    r"\.shared(?:::cta)?\.b16"
)
ACCESSES = {LOAD: load, STORE: store, ATOMIC: atomic, MATRIX: matrix}
