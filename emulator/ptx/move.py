"""mov and cvta: copies of registers, literals and addresses; parts of registers."""

from .operands import SYMBOL, Operands, bits


def move(o: Operands, kind: str, to: str, source: str) -> str:
    if to.startswith("{"):
        return unpack(o, kind, o.vector(to), o.source(source, kind))
    name = o.register(to, kind)
    if source.startswith("{"):
        return f"{name} = {pack(o, kind, o.vector(source))};"
    return f"{name} = {value(o, kind, source)[0]};"


def value(o: Operands, kind: str, source: str) -> tuple[str, str]:
    """A register, a literal, or a variable's address; and the space of the latter."""
    found = SYMBOL.fullmatch(source)
    if kind == "pred" or found is None or o.scopes.register(source):
        return o.source(source, kind), ""
    name, space = o.scopes.symbol(o.statement, found[1])
    if kind[1:] != "64" and not (kind[1:] == "32" and space == "shared"):
        raise o.refuse("expected an address of 64 bits")
    return name + (f" + {bits(int(found[2]), 8)}" if found[2] else ""), space


def to_generic(o: Operands, space: str, to: str, source: str) -> str:
    address, of = value(o, "u64", source)
    if of not in ("", space):
        raise o.refuse(f"{source} lies in .{of}")
    if space == "shared":
        o.scopes.leaves_shared = True
        address = f"c.from_shared({address})"
    return f"{o.register(to, 'u64')} = {address};"


def unpack(o: Operands, kind: str, elements: list[str], value: str) -> str:
    part = part_type(o, kind, elements)
    shift = int(part[1:])
    code = f"const {kind} whole = {value};"
    for i, element in enumerate(elements):
        if element != "_":
            code += f" {o.register(element, part)} = whole >> {i * shift};"
    return f"{{ {code} }}"


def pack(o: Operands, kind: str, elements: list[str]) -> str:
    part = part_type(o, kind, elements)
    shift = int(part[1:])
    shifted = [f"{kind}({o.source(e, part)}) << {i * shift}" for i, e in enumerate(elements)]
    return " | ".join(shifted)


def part_type(o: Operands, kind: str, elements: list[str]) -> str:
    width = int(kind[1:]) // len(elements) if kind[0] == "b" else 0
    if width not in (16, 32) or width * len(elements) != int(kind[1:]):
        raise o.refuse(f"expected 2 or 4 parts of 16 or 32 bits, got {len(elements)}")
    return f"b{width}"
