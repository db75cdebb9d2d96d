"""Corner: the private names that one module needs, and which of them this torch lacks.

A name is a dotted path. Behind a class it may be an attribute that its methods use, behind a
function a local variable.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any, NoReturn, TypeVar

import torch

_T = TypeVar("_T")


class Corner:
    """The private names of one corner. Those given here have a fallback: they are only probed."""

    def __init__(self, *names: str) -> None:
        self.names = [*names]

    def bind(self, name: str) -> Any:
        """What the name stands for; if torch lacks it, a class that raises when it is used."""
        return self.needs(name)(None if absence([name]) else _find(name))

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
    lost = ", ".join(name for name in names if not _is_there(name))
    if lost:
        return f"torch {torch.__version__} has no {lost}, which zcomm needs; install torch 2.13"
    return ""


def _stand_in(names: Iterable[str]) -> Any:
    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(absence(names))

    return type("Missing", (), {"__new__": fail, "__init_subclass__": fail})


def _is_there(name: str) -> bool:
    try:
        _find(name)
    except (AttributeError, ImportError):
        return False
    return True


def _find(name: str) -> Any:
    owner_name, _, last = name.rpartition(".")
    owner = _find(owner_name) if owner_name else None
    if owner is None or (isinstance(owner, ModuleType) and not hasattr(owner, last)):
        return importlib.import_module(name)
    return None if last in _used_inside(owner) else getattr(owner, last)


def _used_inside(owner: Any) -> set[str]:
    """The attributes that a class's methods use but the class lacks; a function's variables."""
    if isinstance(owner, type):
        members = [
            inspect.unwrap(m) for c in owner.__mro__ for m in vars(c).values() if callable(m)
        ]
        codes = [m.__code__ for m in members if isinstance(m, FunctionType)]
        return {name for code in codes for name in code.co_names} - {*dir(owner)}
    function = inspect.unwrap(owner) if callable(owner) else owner
    return set(function.__code__.co_varnames) if isinstance(function, FunctionType) else set()
