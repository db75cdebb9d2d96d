"""docs/guide.md explains every error message that zcomm can raise, and no other.

A message is a template: its constant text, with … in place of every value. An entry of the guide
is a piece of one, in backticks in the first column of a table; its own … stand for any text.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/guide.md"
GAP = "…"
# Functions that raise the message they are given, and the position of that argument.
RAISING = {"refuse": 1, "give_up": 0, "warn": 0, "exit": 0, "error": 0}
# Words that are in too many messages to identify one.
USUAL = re.compile(r"\b(expected|got|rank|ranks|parameter|parameters|of|a|the|in|on|for)\b")


class Message(NamedTuple):
    where: str
    text: str


# The messages of the Python source.


@cache
def modules() -> dict[str, ast.Module]:
    paths = sorted((ROOT / "zcomm").rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


@cache
def exceptions() -> set[str]:
    """The names of Python's exceptions and of zcomm's."""
    known = {
        name
        for name, it in vars(builtins).items()
        if isinstance(it, type) and issubclass(it, BaseException)
    }
    nodes = [node for tree in modules().values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    for _ in range(3):  # a class may come before its base
        known |= {c.name for c in classes if any(last_name(b) in known for b in c.bases)}
    return known


def last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def message_of(call: ast.Call) -> ast.expr | None:
    """The argument that is an error's message, if the call makes or raises an error."""
    name = last_name(call.func)
    if name == "AssertionError":  # a bug of zcomm's own, not for users
        return None
    made = name in exceptions() or name.endswith(("Error", "Exception"))
    index = 0 if made else RAISING.get(name, len(call.args))
    return call.args[index] if index < len(call.args) else None


class Texts:
    """The constant text that expressions of one file stand for."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self.functions = {node.name: node for node in nodes}
        self.tree = tree

    def messages(self) -> Iterator[tuple[int, str]]:
        for call, scope in calls(self.tree, None):
            message = message_of(call)
            if message is not None:
                yield call.lineno, squeezed(self.text(message, scope))

    def text(self, node: ast.expr | None, scope: ast.FunctionDef | None) -> str:
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=parts):
                return "".join(self.text(part, scope) for part in parts)
            case ast.FormattedValue(value=ast.Name() as name, conversion=-1, format_spec=None):
                return self.text(name, scope)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.text(left, scope) + self.text(right, scope)
            case ast.Name(id=name) if scope is not None and name in assigned(scope):
                return self.text(assigned(scope)[name], scope)
            case ast.Call(func=ast.Name(id=name)) if name in self.functions:
                function = self.functions[name]
                returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
                return self.text(returned[-1], function) if returned else GAP
        return GAP


def calls(
    node: ast.AST, scope: ast.FunctionDef | None
) -> Iterator[tuple[ast.Call, ast.FunctionDef | None]]:
    """Every call, with the function that contains it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, scope
        yield from calls(child, child if isinstance(child, ast.FunctionDef) else scope)


@cache
def assigned(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """Local names that are assigned exactly once, and their values."""
    nodes = list(ast.walk(function))
    stored = [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    times = Counter([*stored, *(node.arg for node in nodes if isinstance(node, ast.arg))])
    return {
        target.id: node.value
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and times[target.id] == 1
    }


def squeezed(text: str) -> str:
    return re.sub(f"{GAP}+", GAP, text)


# The messages of the native source.


def native_messages(source: str) -> Iterator[tuple[int, str]]:
    for found in re.finditer(r"(throw [\w:]+|\bexpected_got|\bTopkFault)[({]", source):
        given = [cpp_text(argument) for argument in cpp_arguments(source, found.end())]
        line = source.count("\n", 0, found.start()) + 1
        if found[1].startswith("throw"):
            yield line, given[0]
        elif found[1] == "TopkFault":
            yield line, f"expected {given[1]}, got {GAP}"
        elif given[0] != GAP:  # a message that is handed on
            what = " ".join(filter(None, given[:2]))
            yield line, f"expected {what}, got {given[2]}"


def cpp_arguments(source: str, start: int) -> list[str]:
    """The arguments of a call, up to its closing bracket."""
    depth, arguments = 0, [""]
    for token in re.findall(r'"(?:[^"\\]|\\.)*"|.', source[start : start + 1000], re.DOTALL):
        depth += (token in "({") - (token in ")}")
        if depth < 0:
            break
        if token == "," and depth == 0:
            arguments.append("")
        else:
            arguments[-1] += token
    return [" ".join(argument.split()) for argument in arguments]


def cpp_text(argument: str) -> str:
    tokens = re.findall(r'"((?:[^"\\]|\\.)*)"|([^"\s]+)', argument)
    return squeezed("".join(GAP if other else text for text, other in tokens))


# What the guide says about them.


@cache
def messages() -> tuple[Message, ...]:
    """Every message, except those that only prefix another one with a location."""
    found = []
    for name, tree in modules().items():
        found += [Message(f"{name}:{line}", text) for line, text in Texts(tree).messages()]
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        # The emulator's messages are for kernel authors.
        if path.suffix in (".h", ".cpp") and not {"tests", "emulator"} & set(path.parts):
            native = native_messages(path.read_text())
            where = path.relative_to(ROOT)
            found += [Message(f"{where}:{line}", text) for line, text in native]
    return tuple(m for m in found if len(re.sub(r"[^A-Za-z]", "", m.text)) > 4)


@cache
def entries() -> tuple[str, ...]:
    section = GUIDE.read_text().split("\n## Troubleshooting\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return tuple(entry for row in rows for entry in re.findall(r"`([^`]+)`", row.split(" | ")[0]))


def explains(entry: str, message: str) -> bool:
    """Whether the entry is the message, or a part that identifies it."""
    if entry == message:
        return True
    pieces = [re.escape(piece) for piece in entry.split(GAP) if piece]
    telling = re.sub(r"[^A-Za-z]", "", USUAL.sub("", entry))
    return len(telling) > 3 and re.search(".*".join(pieces), message, re.DOTALL) is not None


def test_every_message_is_in_the_guide() -> None:
    left = [m for m in messages() if not any(explains(entry, m.text) for entry in entries())]
    missing = [f"{message.where}: {message.text}" for message in left]
    assert not missing, "docs/guide.md says nothing of\n" + "\n".join(missing)


def test_every_entry_of_the_guide_is_a_message() -> None:
    gone = [e for e in entries() if not any(explains(e, m.text) for m in messages())]
    assert not gone, "zcomm has no message\n" + "\n".join(gone)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("zcomm/sharding/settings.py", "verify: expected a bool, got …"),  # one string
        (
            "zcomm/zero/sharded_gradient.py",
            "p.grad of parameter …: expected no access, because under",
        ),
        ("zcomm/zero/consolidate.py", "load_state_dict: expected groups of …"),  # a local name
        ("zcomm/codecs/layout.py", "wire …: expected … bytes, got …"),
        (
            "zcomm/engine/inbox.py",
            "zcomm: the engine was stopped",
        ),  # an exception of zcomm's own
        ("zcomm/codecs/blocks.py", "expected code 0 in a zero or NaN block"),  # refuse(...)
        ("csrc/cpu/decode.cpp", "expected a scale that is zero, normal or NaN, got …"),
        ("csrc/cpu/topk_decode.cpp", "expected topk counts that add up to k, got …"),
        ("csrc/cpu/layout.cpp", "layout: expected a segment's body at byte …, got …"),
    ],
)
def test_messages_are_found_in_the_source(where: str, text: str) -> None:
    assert any(m.where.startswith(where) and text in m.text for m in messages())


def test_an_entry_must_tell_messages_apart() -> None:
    assert explains("expected a decay", "feedback: expected a decay between 0 and 1, got …")
    assert explains("decay … got", "feedback: expected a decay between 0 and 1, got …")
    assert not explains("got … decay", "feedback: expected a decay between 0 and 1, got …")
    assert not explains("expected …, got …", "feedback: expected a decay between 0 and 1, got …")
    assert explains("expected …, got …", "expected …, got …")
