"""Corner: the private names that one module needs, and which of them this torch lacks.

A name is a dotted path. Behind a class it may be an attribute that its methods use, behind a
function a local variable.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import attrgetter
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import torch

_T = TypeVar("_T")
_ABSENT = object()


class Corner:
    """The private names of one corner. Those given here have a fallback: they are only probed."""

    def __init__(self, *names: str) -> None:
        self.names = [*names]

    def bind(self, name: str) -> Any:
        """What the name stands for; if torch lacks it, a class that raises when it is used."""
        return self.needs(name)(_find(name))

    def reader(self, name: str) -> Any:
        """A function that reads this attribute of an object."""
        return self.needs(name)(attrgetter(name.rpartition(".")[2]))

    def needs(self, *names: str) -> Callable[[_T], _T]:
        """Decorates a function or class that uses these names; it raises if torch lacks one."""
        self.names += names
        return lambda user: _stand_in(names) if absence(names) else user

    def missing(self) -> str:
        """Names what this torch lacks; "" if it has everything."""
        return absence(self.names)


def absence(names: Iterable[str]) -> str:
    lost = ", ".join(name for name in names if _find(name) is _ABSENT)
    if lost:
        return f"torch {torch.__version__} has no {lost}, which zcomm needs; install torch 2.13"
    return ""


def _stand_in(names: Iterable[str]) -> Any:
    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(absence(names))

    return type("Missing", (), {"__new__": fail, "__init_subclass__": fail})


def _find(name: str) -> Any:
    if name == "torch":
        return torch
    owner_name, _, last = name.rpartition(".")
    owner = _find(owner_name)
    found = getattr(owner, last, _ABSENT)
    if found is _ABSENT and isinstance(owner, ModuleType):
        with suppress(ImportError):
            return importlib.import_module(name)
    return None if found is _ABSENT and last in _used_inside(owner) else found


def _used_inside(owner: Any) -> set[str]:
    """The attributes that the methods of a class use, or the variables of a function."""
    if not isinstance(owner, type):
        return {*getattr(getattr(inspect.unwrap(owner), "__code__", None), "co_varnames", ())}
    members = [inspect.unwrap(member) for c in owner.__mro__ for member in vars(c).values()]
    return {name for m in members if hasattr(m, "__code__") for name in m.__code__.co_names}
