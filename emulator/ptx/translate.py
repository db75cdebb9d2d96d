"""The statements of a kernel as lines of C++."""

import re

from . import memory
from .apply import apply
from .move import move, to_generic
from .operands import Operands, Scopes, cpp_name, split_operands
from .source import Brace, Kernel, Label, Module, PtxError, Statement

STATEMENT = re.compile(
    r"(?:@(?P<guard>!?\s*[\w$%]+)\s+)?(?P<opcode>[a-z][\w.:]*)(?:\s+(?P<rest>.*))?"
)
MOVE = re.compile(r"mov\.(?P<T>pred|[bus](?:16|32|64)|f32|f64)")
TO_GENERIC = re.compile(r"cvta\.(?P<space>global|shared|local|param|const)\.u64")
BRANCH = re.compile(r"bra(?:\.uni)?")
BRANCH_TABLE = re.compile(r"brx\.idx(?:\.uni)?")


class Translator:
    """Translates the statements of one kernel."""

    def __init__(self, kernel: Kernel, module: Module):
        self.kernel = kernel
        self.scopes = Scopes(kernel, {v.name: v for v in module.variables})
        self.labels: dict[str, str] = {}
        self.tables: dict[str, list[str]] = {}
        self.targets: list[tuple[str, Statement]] = []

    def body(self) -> list[str]:
        lines: list[str] = []
        table_name = ""
        for item in self.kernel.body:
            if isinstance(item, Brace):
                (self.scopes.open if item.opens else self.scopes.close)()
            elif isinstance(item, Label):
                table_name = item.name
                lines.append(self.label(item))
            elif item.text.startswith(".branchtargets"):
                lines.pop()
                del self.labels[table_name]
                self.tables[table_name] = split_operands(item.text.removeprefix(".branchtargets"))
            elif item.text.startswith("."):
                self.directive(item)
            else:
                lines.append(f"  {self.statement(item)}  // {item.line}: {item.text}")
        self.check_labels()
        return lines

    def label(self, label: Label) -> str:
        if label.name in self.labels:
            raise PtxError(label.line, label.name, "the label is there twice")
        self.labels[label.name] = cpp_label(label.name)
        return f"{cpp_label(label.name)}:;"

    def check_labels(self) -> None:
        for name, statement in self.targets:
            if name not in self.labels:
                raise PtxError(statement.line, statement.text, f"there is no label {name}")

    def directive(self, item: Statement) -> None:
        if item.text.startswith(".reg"):
            self.scopes.declare_registers(item)
        elif not item.text.startswith(".pragma"):
            self.scopes.declare_variable(item)

    def statement(self, item: Statement) -> str:
        found = STATEMENT.fullmatch(item.text)
        if found is None:
            raise PtxError(item.line, item.text, "expected an instruction")
        o = Operands(self.scopes, item)
        code = self.instruction(o, found["opcode"], split_operands(found["rest"] or ""))
        if found["guard"]:
            return f"if ({o.predicate(found['guard'])}) {code}"
        return code

    def instruction(self, o: Operands, opcode: str, operands: list[str]) -> str:
        refuse_inexact(o, opcode)
        for pattern, access in memory.ACCESSES.items():
            if found := pattern.fullmatch(opcode):
                return access(o, found, operands)
        if found := MOVE.fullmatch(opcode):
            memory.expect(o, operands, 2)
            return move(o, found["T"], *operands)
        if found := TO_GENERIC.fullmatch(opcode):
            memory.expect(o, operands, 2)
            return to_generic(o, found["space"], *operands)
        if BRANCH.fullmatch(opcode):
            memory.expect(o, operands, 1)
            return self.goto(o, operands[0])
        if BRANCH_TABLE.fullmatch(opcode):
            memory.expect(o, operands, 2)
            return self.switch(o, *operands)
        return apply(o, opcode, operands)

    def goto(self, o: Operands, name: str) -> str:
        self.targets.append((name, o.statement))
        return f"goto {cpp_label(name)};"

    def switch(self, o: Operands, index: str, table: str) -> str:
        if table not in self.tables:
            raise o.refuse(f"there are no .branchtargets {table} before it")
        cases = [f"case {i}: {self.goto(o, n)}" for i, n in enumerate(self.tables[table])]
        cases.append(f"default: c.trap({o.statement.line});")
        return f"switch ({o.source(index, 'u32')}) {{ {' '.join(cases)} }}"


def cpp_label(name: str) -> str:
    return "L" + cpp_name(name)


def refuse_inexact(o: Operands, opcode: str) -> None:
    """What a GPU may compute in more than one way has no bits to compare."""
    parts = opcode.split(".")
    for inexact in ("approx", "full", "ftz"):
        if inexact in parts:
            raise o.refuse(f".{inexact} is not IEEE arithmetic: compile without --use_fast_math")
    floats = parts[-1] in ("f32", "f64", "f32x2")
    if floats and parts[0] in ("add", "sub", "mul", "fma", "mad") and "rn" not in parts:
        raise o.refuse(
            f"{parts[0]} of floats without .rn may be fused or round otherwise: "
            "compile with --fmad=false"
        )
