"""Private names of torch are used in zcomm/torch_private alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from zcomm.torch_private import CORNERS

ROOT = Path(__file__).resolve().parents[2] / "zcomm"
# What is not private, in spite of its name, and what belongs to others.
NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}
OTHERS = {"hashlib._Hash", "sys._getframe"}
# Of torch, without an underscore, and neither documented nor of anything else.
UNDOCUMENTED = {
    "alltoall_base",
    "comm_ctx",
    "fsdp_params",
    "mesh_info",
    "mp_policy",
    "parameters_to_ignore",
    "pg_map",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def known_names() -> set[str]:
    """The names that corners list, as far as they can be told from zcomm's own."""
    corners = [import_module(f"zcomm.torch_private.{name}") for name in CORNERS]
    parts = {part for c in corners for path in c._corner.names for part in re.split(r"[.|]", path)}
    return {part for part in parts if is_private(part)} | UNDOCUMENTED


def own_names(trees: list[ast.Module]) -> set[str]:
    """The private attributes that zcomm's own classes and modules define."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


def of_self(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("self", "cls", "super()")


def torch_names(tree: ast.Module) -> set[str]:
    """The names in a file that are torch, or something of it."""
    found = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if f"{module}.{alias.name}".lstrip(".").split(".")[0] == "torch":
                    found.add(alias.asname or alias.name.split(".")[0])
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(node.value, ast.Attribute) and root(node.value) in found:
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def root(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_names(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Line and text of what a file uses of torch and should not."""
    known, of_torch = known_names(), torch_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(map(is_private, parts)):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "torch" and any(map(is_private, parts)):
                    yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Attribute):
            name, text = node.attr, ast.unparse(node)
            if of_self(node) or name in NAMED_TUPLE or text in OTHERS:
                continue
            unknown = is_private(name) and (name not in own or root(node) in of_torch)
            if unknown or name in known:
                yield node.lineno, text
        # getattr(x, "_name"), name.replace("_name.", "")
        elif isinstance(node, ast.Constant) and str(node.value).strip(".") in known:
            yield node.lineno, repr(node.value)


def test_private_names_of_torch_are_in_one_package() -> None:
    trees = {p: ast.parse(p.read_text()) for p in sorted(ROOT.rglob("*.py"))}
    own = own_names(list(trees.values()))
    found = [
        f"zcomm/{path.relative_to(ROOT)}:{line}: {text}"
        for path, tree in trees.items()
        if "torch_private" not in path.parts
        for line, text in private_names(tree, own)
    ]
    assert not found, "give these a place in zcomm/torch_private:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "import torch\ntorch._C.x()",
        "import torch\ntorch._foreach_add_(a, b)",
        "import torch.distributed as dist\ndist.distributed_c10d._world",
        "from torch.utils._pytree import tree_leaves",
        "from torch.utils import _pytree",
        "from torch import Tensor\nTensor._make_subclass(cls, t)",
        "import torch\naten = torch.ops.aten\naten._foreach_zero_.default",
        "t.untyped_storage()._cdata",
        "self.parameter._version",
        "parameter._never_seen_before",
        'getattr(ddp, "_join_config", None)',
        'name.replace("_orig_mod.", "")',
        "group.alltoall_base(out, send)",
        "import torch\ntorch._own(x)",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert list(private_names(ast.parse(source), {"_own"}))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__",
        "self._version = 1\nself._timeout",
        "handle._own",
        "item._replace(offset=1)",
        '"""A text about _orig_mod and torch._C."""',
        "class A:\n    def __torch_dispatch__(cls): ...",
    ],
)
def test_names_of_zcomm_and_protocols_are_allowed(source: str) -> None:
    assert not list(private_names(ast.parse(source), {"_own"}))
