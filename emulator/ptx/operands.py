"""Operands of a kernel's statements as C++ expressions; registers are raw bits of their width."""

import re
from dataclasses import dataclass, field
from functools import cached_property

from .source import TYPE_NBYTES, Kernel, PtxError, Statement, Variable, integer, parse_variable

INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?")
FLOAT = {4: re.compile(r"0[fF][0-9a-fA-F]{8}"), 8: re.compile(r"0[dD][0-9a-fA-F]{16}")}
ADDRESS = re.compile(r"\[\s*([\w$%.]+)\s*(?:\+\s*(-?\w+)\s*)?\]")
SYMBOL = re.compile(r"([A-Za-z_$][\w$]*)(?:\s*\+\s*(-?\d+))?")
REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.+)")
AXES = {"tid": "index", "ctaid": "cta", "ntid": "block", "nctaid": "grid"}
SPECIAL = {
    f"%{ptx}.{axis}": f"c.thread.{ours}.{axis}" for ptx, ours in AXES.items() for axis in "xyz"
}
SPECIAL |= {"%laneid": "c.thread.lane", "%warpid": "c.thread.warp"}
SPECIAL |= {
    f"%lanemask_{r}": f"ptx::lanemask_{r}(c.thread.lane)" for r in ("eq", "lt", "le", "gt", "ge")
}


def cpp_name(name: str) -> str:
    return re.sub(r"\W", "_", name)


def nbytes_of(type_name: str) -> int:
    """Bytes of a register of this type; 0 stands for a predicate."""
    return 0 if type_name == "pred" else TYPE_NBYTES[type_name]


def split_operands(text: str) -> list[str]:
    """At the commas that are in no braces."""
    parts = re.split(r",(?![^{]*\})", text)
    return [p.strip() for p in parts] if text.strip() else []


@dataclass
class Scopes:
    """Names that a kernel's statements may use: registers by scope, variables, labels."""

    kernel: Kernel
    globals: dict[str, Variable]
    registers: list[dict[str, tuple[str, int]]] = field(default_factory=list)
    used: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    shared_nbytes: int = 0
    uses_dynamic: bool = False
    leaves_shared: bool = False  # whether a shared address becomes a generic one
    opened: int = 0

    @cached_property
    def params(self) -> dict[str, int]:
        return self.kernel.param_offsets

    def open(self) -> None:
        self.registers.append({})
        self.opened += 1

    def close(self) -> None:
        self.registers.pop()

    def declare_registers(self, statement: Statement) -> None:
        found = REGISTERS.fullmatch(statement.text)
        if found is None or (found[1] != "pred" and found[1] not in TYPE_NBYTES):
            raise PtxError(statement.line, statement.text, "unknown .reg")
        for name in split_operands(found[2]):
            ranged = re.fullmatch(r"([\w$%]+)<(\d+)>", name)
            names = [f"{ranged[1]}{i}" for i in range(int(ranged[2]))] if ranged else [name]
            for each in names:
                # A trailing underscore, because PTX names may be C++ keywords.
                ours = re.sub(r"\W", "", each) + "_" + (str(self.opened) if self.opened > 1 else "")
                self.registers[-1][each] = (ours, nbytes_of(found[1]))

    def declare_variable(self, statement: Statement) -> None:
        variable = parse_variable(statement)
        if variable.space not in ("shared", "local"):
            raise PtxError(statement.line, statement.text, "expected .shared or .local in a kernel")
        self.variables[variable.name] = variable

    def register(self, name: str) -> tuple[str, int] | None:
        """The C++ name and the width of a register, if it is one."""
        for scope in reversed(self.registers):
            if name in scope:
                self.used[scope[name][0]] = scope[name][1]
                return scope[name]
        return None

    def variable(self, name: str) -> Variable | None:
        return self.variables.get(name) or self.globals.get(name)

    def symbol(self, statement: Statement, name: str) -> tuple[str, str]:
        """A variable's address as its space has it, and that space."""
        if name in self.params:
            offset = self.params[name]
            return f"c.param + {offset}" if offset else "c.param", "param"
        variable = self.variable(name)
        if variable is None:
            raise PtxError(statement.line, statement.text, f"{name} is not declared")
        if variable.space == "shared":
            return self.shared_address(variable), "shared"
        where = {"global": "module.", "const": "constants.", "local": "local_"}[variable.space]
        return f"ptx::address_of({where}{cpp_name(name)})", variable.space

    def shared_address(self, variable: Variable) -> str:
        """Static shared variables lie one after another; dynamic memory has a window of its own."""
        if variable.extern:
            self.uses_dynamic = True
            return "ptx::kDynamicShared"
        if variable.name not in self.offsets:
            begin = -(-self.shared_nbytes // variable.align) * variable.align
            self.offsets[variable.name] = begin
            self.shared_nbytes = begin + variable.nbytes
        return f"{self.offsets[variable.name]}u"


def bits(value: int, nbytes: int) -> str:
    suffix = "ull" if nbytes == 8 else "u"
    return f"{value & (1 << 8 * nbytes) - 1:#x}{suffix}"


class Operands:
    """The operands of one statement."""

    def __init__(self, scopes: Scopes, statement: Statement):
        self.scopes, self.statement = scopes, statement

    def refuse(self, reason: str) -> PtxError:
        return PtxError(self.statement.line, self.statement.text, reason)

    def register(self, text: str, type_name: str, wider: bool = False) -> str:
        found = self.scopes.register(text)
        if found is None:
            raise self.refuse(f"expected a register, got {text}")
        name, nbytes = found
        expected = nbytes_of(type_name)
        if nbytes != expected and not (wider and nbytes > expected > 0):
            raise self.refuse(f"expected a register of .{type_name}, got {text}")
        return name

    def source(self, text: str, type_name: str, wider: bool = False) -> str:
        """A register, a special register, or a literal."""
        if type_name == "pred":
            if INTEGER.fullmatch(text):
                return "false" if integer(text) == 0 else "true"
            return self.predicate(text)
        nbytes = nbytes_of(type_name)
        if INTEGER.fullmatch(text) and not type_name.startswith(("f", "bf")):
            return self.literal(text, nbytes)
        if nbytes in FLOAT and FLOAT[nbytes].fullmatch(text):
            return bits(integer(text), nbytes)
        if text in SPECIAL:
            return f"std::uint{8 * nbytes}_t({SPECIAL[text]})"
        return self.register(text, type_name, wider)

    def literal(self, text: str, nbytes: int) -> str:
        value = integer(text)
        if not -(1 << 63) <= value < 1 << 64:
            raise self.refuse(f"{text} has more than 64 bits")
        return bits(value, nbytes)

    def predicate(self, text: str) -> str:
        if text.startswith("!"):
            return "!" + self.register(text[1:].strip(), "pred")
        return self.register(text, "pred")

    def constant(self, text: str) -> str:
        if not INTEGER.fullmatch(text):
            raise self.refuse(f"expected a literal, got {text}")
        return str(integer(text))

    def pair(self, text: str, types: tuple[str, str]) -> tuple[str, str]:
        """`d|p`: two destinations. The second may be left out, and either may be `_`."""
        parts = [p.strip() for p in text.split("|")]
        if len(parts) > 2:
            raise self.refuse(f"expected at most two destinations, got {text}")
        parts += ["_"] * (2 - len(parts))
        first, second = (
            "ptx::Sink()" if p == "_" else self.register(p, t) for p, t in zip(parts, types)
        )
        return first, second

    def vector(self, text: str) -> list[str]:
        inside = re.fullmatch(r"\{(.*)\}", text)
        return [p.strip() for p in inside[1].split(",")] if inside else [text]

    def address(self, text: str, space: str) -> str:
        """An address as `space` has it: 32 bits in shared memory, the host's 64 otherwise."""
        found = ADDRESS.fullmatch(text)
        if found is None:
            raise self.refuse(f"expected an address, got {text}")
        base, offset = found[1], integer(found[2] or "0")
        register = self.scopes.register(base)
        if register is None:
            name, of = self.scopes.symbol(self.statement, base)
            if of != space:
                raise self.refuse(f"{base} lies in .{of}, not in .{space or 'generic'}")
        else:
            name, nbytes = register
            if nbytes != 8 and not (nbytes == 4 and space == "shared"):
                raise self.refuse(f"expected an address of 64 bits, got {base}")
        return f"{name} + {bits(offset, 4 if space == 'shared' else 8)}" if offset else name
