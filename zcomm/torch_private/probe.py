"""Corner: the private names that one module needs, and which of them this torch lacks.

A name is a dotted path. Behind a class it may be an attribute that its methods use, behind a
function a local variable. It may end in several names, as in "torch.Tensor.new|old": versions of
torch differ, and each has at least one of them.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import torch

_T = TypeVar("_T")
_ABSENT = object()
# `make test-torch` has run with both, and with some in between; docs/get-started.md has the table.
OLDEST, NEWEST = "2.6", "2.15"


class Corner:
    """The private names of one corner. Those given here have a fallback: they are only probed.

    `user` is what needs them, and `oldest` the first torch that has them all.
    """

    def __init__(self, *names: str, user: str = "zcomm", oldest: str = OLDEST) -> None:
        self.names, self.user, self.oldest = [*names], user, oldest

    def bind(self, name: str) -> Any:
        """What the name stands for; if torch lacks it, a class that raises when it is used."""
        return self.needs(name)(_find(name))

    def reader(self, name: str) -> Any:
        """A function that reads this attribute of an object."""
        return self.needs(name)(attrgetter(name.rpartition(".")[2]))

    def needs(self, *names: str) -> Callable[[_T], _T]:
        """Decorates a function or class that uses these names; it raises if torch lacks one."""
        self.names += names
        lost = _lost(names)
        return lambda user: _stand_in(self, lost) if lost else user

    def missing(self) -> str:
        """Names what this torch lacks; "" if it has everything."""
        lost = _lost(self.names)
        return _refusal(self, lost) if lost else ""


def _refusal(of: Corner, lost: Sequence[str]) -> str:
    return (
        f"{of.user}: expected torch {of.oldest} to {NEWEST}, got {torch.__version__}, which has no "
        f"{', '.join(lost)}; pip install 'torch=={NEWEST}.*'"
    )


def _lost(names: Iterable[str]) -> list[str]:
    return [name for name in names if _find(name) is _ABSENT]


def _stand_in(of: Corner, lost: Sequence[str]) -> Any:
    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(_refusal(of, lost))

    return type("Missing", (), {"__new__": fail, "__init_subclass__": fail})


def _find(name: str) -> Any:
    if name == "torch":
        return torch
    owner_name, _, last = name.rpartition(".")
    owner = _find(owner_name)
    found = (_member(owner, owner_name, one) for one in last.split("|"))
    return next((member for member in found if member is not _ABSENT), _ABSENT)


def _member(owner: Any, owner_name: str, last: str) -> Any:
    found = getattr(owner, last, _ABSENT)
    if found is _ABSENT and isinstance(owner, ModuleType):
        with suppress(ImportError):
            return importlib.import_module(f"{owner_name}.{last}")
    return None if found is _ABSENT and last in _used_inside(owner) else found


def _used_inside(owner: Any) -> set[str]:
    """The attributes that the methods of a class use, or the variables of a function."""
    if not isinstance(owner, type):
        return {*getattr(getattr(inspect.unwrap(owner), "__code__", None), "co_varnames", ())}
    members = [inspect.unwrap(member) for c in owner.__mro__ for member in vars(c).values()]
    return {name for m in members if hasattr(m, "__code__") for name in m.__code__.co_names}
